"""Updates shards: main parameters, loss scale, clipping, schedules of learning rate and weight decay."""

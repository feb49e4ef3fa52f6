"""Line coverage of `megatron/` and `megatron_lab/` by a run of the tests, forked ranks and started programs included."""

"""Line coverage of `megatron/` by a run of the tests, forked ranks and started programs included."""

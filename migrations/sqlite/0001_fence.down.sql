drop table fencerow_fence;

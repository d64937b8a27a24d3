drop table fencerow_idempotency;

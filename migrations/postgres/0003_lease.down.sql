drop function fencerow.lease_holder(text);
drop function fencerow.disown_lease(text, uuid);
drop function fencerow.release_lease(text, uuid);
drop function fencerow.renew_lease(text, uuid, bigint);
drop function fencerow.seed_lease(text, uuid, bigint);
drop function fencerow.acquire_lease(text, uuid, bigint, text, bigint, text);
drop function fencerow.lineage();
drop table fencerow.lease;

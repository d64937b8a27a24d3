drop function fencerow.record(text, text, bigint, uuid, text);
drop function fencerow.claim(text, text, bytea, text, bigint, uuid);
drop table fencerow.idempotency;
drop function fencerow.require_response();

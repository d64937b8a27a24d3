-- The schema itself stays: it holds the table of migrations.
drop function fencerow.admitted(text, bigint, uuid);
drop function fencerow.admit(text, bigint, uuid);
drop function fencerow.admit_first(text, bigint, uuid);
drop function fencerow.admission(text, bigint, uuid);
drop function fencerow.renumber(text, uuid, bigint, integer, boolean);
drop function fencerow.next_epoch(text, uuid, bigint);
drop function fencerow.raise(text, bigint, uuid, integer, boolean);
drop function fencerow.lift(text, bigint, uuid);
drop function fencerow.wait_alone(text, bigint, uuid, integer, boolean);
drop function fencerow.standing(text);
drop function fencerow.stands_at(text, bigint, uuid);
drop function fencerow.refuse(text, bigint, bigint);
drop function fencerow.check_grant(text, bigint, uuid);
drop function fencerow.lock_key(text);
drop table fencerow.fence;

-- One row for each resource ever held; it stays when a lease ends, since the counter lives in it.
-- Times are milliseconds: ends by the clock that starts at boot, since by the wall clock, for people.
create table if not exists lease (
    resource   text not null primary key check (length(cast(resource as blob)) between 1 and 512),
    counter    integer check (counter > 0),
    forgotten  integer not null default 0 check (forgotten in (0, 1)),
    owner      blob check (length(owner) = 16),
    token      integer check (token between 1 and counter),
    boot       text,
    ends_ms    integer,
    ttl_ms     integer,
    since_ms   integer,
    host       text,
    process    integer,
    label       text
) strict, without rowid

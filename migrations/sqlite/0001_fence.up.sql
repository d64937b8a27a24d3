-- The fence: what the database remembers of each resource. The rules are enforced by the library,
-- inside `begin immediate`: a file has one writer at a time, so nothing can come in between.
create table fencerow_fence (
    resource   text not null primary key check (length(cast(resource as blob)) between 1 and 512),
    last_token integer not null check (last_token > 0),
    owner      blob not null check (length(owner) = 16),
    raised_at  text not null
) strict, without rowid;

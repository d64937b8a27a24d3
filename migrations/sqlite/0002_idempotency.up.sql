-- Idempotency keys: one record for each piece of work, written in the transaction that does it.
create table fencerow_idempotency (
    scope       text not null check (length(cast(scope as blob)) <= 512),
    key         text not null check (length(cast(key as blob)) between 1 and 512),
    fingerprint blob not null,
    resource    text not null,
    token       integer not null,
    owner       blob not null,
    response    text,
    claimed_at  text not null,
    primary key (scope, key)
) strict, without rowid;

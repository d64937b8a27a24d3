-- Idempotency keys: one record for each piece of work, written in the transaction that does it.

create table fencerow.idempotency (
    scope       text collate "C" not null,
    key         text collate "C" not null,
    fingerprint bytea not null,
    resource    text collate "C" not null,
    token       bigint not null,
    owner       uuid not null,
    response    json,
    claimed_at  timestamptz not null,
    constraint idempotency_pkey primary key (scope, key),
    constraint idempotency_scope_length check (octet_length(scope) <= 512),
    constraint idempotency_key_length check (octet_length(key) between 1 and 512)
);

comment on table fencerow.idempotency is
    'What has been done, by whom, and what was answered. Deleting a record lets its work run again.';

-- Takes a key for the work of this transaction.
--
-- fresh is true if the key was not taken: the record is written, and commits or vanishes with the
-- work. Otherwise the record's own fingerprint, resource and response are returned; response is
-- null where it was never recorded. A rival in flight is waited for: if it commits, its record is
-- returned; if it rolls back, the key is fresh. Above READ COMMITTED a rival's record that the
-- snapshot cannot see raises 40001.
create function fencerow.claim(
    scope text,
    key text,
    fingerprint bytea,
    resource text,
    token bigint,
    owner uuid,
    out fresh boolean,
    out seen_fingerprint bytea,
    out seen_resource text,
    out response text
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    loop
        insert into fencerow.idempotency (scope, key, fingerprint, resource, token, owner, claimed_at)
        values ($1, $2, $3, $4, $5, $6, clock_timestamp())
        on conflict on constraint idempotency_pkey do nothing;
        fresh := found;
        exit when fresh;
        -- A statement of its own, so that its snapshot is from after the wait.
        select i.fingerprint, i.resource, i.response::text
          into seen_fingerprint, seen_resource, response
          from fencerow.idempotency i
         where i.scope = $1
           and i.key = $2;
        exit when found;
    end loop;
end
$$;

-- Stores the response of a key that this grant has claimed. False if it has not, or it is stored already.
create function fencerow.record(scope text, key text, token bigint, owner uuid, response text)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update fencerow.idempotency as i
       set response = $5::json
     where i.scope = $1
       and i.key = $2
       and i.token = $3
       and i.owner = $4
       and i.response is null;
    return found;
end
$$;

-- A key that was claimed and never given a response could neither run again nor be replayed. So
-- its transaction is refused at the commit, whoever commits it. Raises ZF006; DETAIL is the key.
-- (Under `set constraints all immediate` it is refused at the claim already.)
create function fencerow.require_response()
returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if exists (
        select from fencerow.idempotency i
         where i.scope = new.scope
           and i.key = new.key
           and i.response is null
    ) then
        raise exception using
            errcode = 'ZF006',
            message = format('idempotency key %L was claimed, and no response was recorded for it', new.key),
            detail = new.key;
    end if;
    return null;
end
$$;

create constraint trigger idempotency_response
    after insert on fencerow.idempotency
    deferrable initially deferred
    for each row when (new.response is null)
    execute function fencerow.require_response();

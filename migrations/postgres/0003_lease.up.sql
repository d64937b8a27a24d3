-- Leases kept in the database itself: who holds each resource, until when by this database's
-- clock, and the counter that its tokens come from.
--
-- Each function is one step of a lock service, meant to be called by itself in a transaction of
-- its own: its row lock lasts until the transaction ends, and holds up every other step on the
-- resource. A wait for it ends after two seconds with 55P03. Nothing here knows of the fence.

-- Rows are kept when a lease ends: the counter lives in them. They are written at every renewal.
create table fencerow.lease (
    resource      text collate "C" not null,
    counter       bigint,
    counted_under text collate "C",
    owner         uuid,
    token         bigint,
    since         timestamptz,
    expires_at    timestamptz,
    host          text,
    process       bigint,
    label          text,
    constraint lease_pkey primary key (resource),
    constraint lease_resource_length check (octet_length(resource) between 1 and 512),
    constraint lease_counter_positive check (counter > 0),
    constraint lease_token_counted check (token between 1 and counter),
    constraint lease_free_or_held check (num_nulls(owner, since, expires_at) in (0, 3))
) with (
    fillfactor = 50,
    autovacuum_vacuum_threshold = 100,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);

comment on table fencerow.lease is
    'Who holds each resource. The counter is the last token that was issued; it is trusted only under the lineage that it was counted under.';

-- Which history this database is writing: the cluster and its timeline. A promoted replica and a
-- cluster that was restored to a point in time are on another timeline, and may have forgotten
-- tokens that were issued on the old one.
create function fencerow.lineage()
returns text
language sql
set search_path = pg_catalog, pg_temp
as $$
    select system_identifier::text || ':' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)
      from pg_control_system()
$$;

-- Takes a lease if it is free or has run out, and counts its token up in the same step.
--
-- outcome is one of
--   granted      token is the lease's
--   unnumbered   the lease is the owner's, but the counter may have forgotten: token is what it
--                holds, if anything; the lease waits for seed_lease
--   held         by another owner, for another remaining_ms
-- The same owner asking again gets the same answer, and its time to live begins again. A refusal
-- reads only. Raises ZF004 for arguments that make no sense, 2200H if the counter is at its end.
create function fencerow.acquire_lease(
    resource text,
    owner uuid,
    ttl_ms bigint,
    host text,
    process bigint,
    label text,
    out outcome text,
    out token bigint,
    out remaining_ms bigint
)
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '2s'
as $$
declare
    ttl interval := $3 * interval '1 millisecond';
    lineage text := fencerow.lineage();
    seen fencerow.lease;
    now_ timestamptz;
begin
    if $1 is null or $2 is null or $3 is null or octet_length($1) not between 1 and 512
       or $3 not between 1 and 9007199254740991 then
        raise exception using
            errcode = 'ZF004',
            message = 'a lease needs a resource of 1 to 512 bytes, an owner and 1 to 2^53 - 1 milliseconds';
    end if;
    -- What a crash makes the counter forget could be issued again.
    if current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'on', true);
    end if;

    loop
        select * into seen from fencerow.lease l where l.resource = $1;
        if not found then
            insert into fencerow.lease (resource) values ($1)
            on conflict on constraint lease_pkey do nothing;
        elsif seen.owner <> $2 and seen.expires_at > clock_timestamp() then
            outcome := 'held';
            remaining_ms := ceil(extract(epoch from seen.expires_at - clock_timestamp()) * 1000);
            return;
        end if;
        select * into seen
          from fencerow.lease l
         where l.resource = $1
           and (l.owner is null or l.owner = $2 or l.expires_at <= clock_timestamp())
           for update;
        -- Otherwise a rival was faster, and is met again above.
        exit when found;
    end loop;

    -- Read once the row is locked, so that a later step never sets an earlier end.
    now_ := clock_timestamp();
    if seen.owner = $2 and seen.expires_at > now_ then
        update fencerow.lease as l set expires_at = now_ + ttl where l.resource = $1;
    else
        if seen.counter = 9223372036854775807 then
            raise exception using errcode = '2200H', message = format('the token counter of %L is at its end', $1);
        end if;
        seen.token := null;
        if seen.counted_under = lineage then
            seen.token := seen.counter + 1;
            seen.counter := seen.token;
        end if;
        update fencerow.lease as l
           set counter = seen.counter,
               owner = $2,
               token = seen.token,
               since = now_,
               expires_at = now_ + ttl,
               host = $4,
               process = $5,
               label = $6
         where l.resource = $1;
    end if;
    outcome := case when seen.token is null then 'unnumbered' else 'granted' end;
    token := coalesce(seen.token, seen.counter);
end
$$;

-- Gives an unnumbered lease the token that was issued for it, and lets the counter go on from
-- there; it never goes back. False if the lease is not the owner's: nothing was changed.
create function fencerow.seed_lease(resource text, owner uuid, token bigint)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '2s'
as $$
begin
    if current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    update fencerow.lease as l
       set token = $3,
           counter = greatest(l.counter, $3),
           counted_under = fencerow.lineage()
     where l.resource = $1
       and l.owner = $2
       and l.expires_at > clock_timestamp();
    return found;
end
$$;

-- Lets a lease last for ttl_ms from now on. False if it is not the owner's: nothing was changed,
-- and no lease was made.
create function fencerow.renew_lease(resource text, owner uuid, ttl_ms bigint)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '2s'
as $$
begin
    if $3 is null or $3 not between 1 and 9007199254740991 then
        raise exception using
            errcode = 'ZF004',
            message = 'a lease lasts 1 to 2^53 - 1 milliseconds';
    end if;
    -- The clock is read again for the row that a wait ends with, so ends are in the order of locks.
    update fencerow.lease as l
       set expires_at = clock_timestamp() + $3 * interval '1 millisecond'
     where l.resource = $1
       and l.owner = $2
       and l.expires_at > clock_timestamp();
    return found;
end
$$;

-- Frees a lease. False if it was not the owner's (any more): nothing was changed.
create function fencerow.release_lease(resource text, owner uuid)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '2s'
as $$
begin
    update fencerow.lease as l
       set owner = null,
           token = null,
           since = null,
           expires_at = null,
           host = null,
           process = null,
           label = null
     where l.resource = $1
       and l.owner = $2
       and l.expires_at > clock_timestamp();
    return found;
end
$$;

-- Frees a lease and marks its counter as one that has forgotten, so that the next grant is
-- unnumbered; what it holds is still a bound. False if the lease was not the owner's.
create function fencerow.disown_lease(resource text, owner uuid)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '2s'
as $$
begin
    if not fencerow.release_lease($1, $2) then
        return false;
    end if;
    update fencerow.lease as l set counted_under = null where l.resource = $1;
    return true;
end
$$;

-- Who holds a resource: one row, or none if it is free.
create function fencerow.lease_holder(resource text)
returns table (owner uuid, token bigint, since_ms bigint, remaining_ms bigint, host text, process bigint, label text)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
    select l.owner,
           l.token,
           floor(extract(epoch from l.since) * 1000)::bigint,
           ceil(extract(epoch from l.expires_at - clock_timestamp()) * 1000)::bigint,
           l.host,
           l.process,
           l.label
      from fencerow.lease l
     where l.resource = $1
       and l.expires_at > clock_timestamp()
$$;

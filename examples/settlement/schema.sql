-- The settlement's tables; the text is the same for Postgres and SQLite.

create table account (
    id         text   not null primary key,
    balance    bigint not null,
    last_token bigint not null
);

create table payout (
    id         text   not null primary key,
    account    text   not null references account (id),
    amount     bigint not null,
    settled_by text,
    last_token bigint not null,
    constraint payout_amount_positive check (amount > 0)
);

-- Two entries for each payout, which sum to zero. No unique key, on purpose: a payout that was
-- settled twice has to show up in the check, not be kept out by an index.
create table entry (
    payout  text   not null references payout (id),
    account text   not null references account (id),
    amount  bigint not null,
    token   bigint not null
);

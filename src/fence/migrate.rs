//! The migrations of the fence's own tables.

use sqlx::SqlStr;
use sqlx::migrate::{Migrate, MigrateError, Migration, MigrationType, Migrator};

/// One migration: its version, its name, and the statements that make and unmake it.
pub(super) type Step = (i64, &'static str, &'static str, &'static str);

/// A migration from its files.
macro_rules! step {
    ($database:literal, $version:literal, $noun:literal) => {
        (
            $version,
            $noun,
            include_str!(concat!("../../migrations/", $database, "/000", $version, "_", $noun, ".up.sql")),
            include_str!(concat!("../../migrations/", $database, "/000", $version, "_", $noun, ".down.sql")),
        )
    };
}
pub(super) use step;

/// Runs the steps that have not been run yet. The caller holds the lock that keeps others out, and
/// the transaction that this is part of.
pub(super) async fn up<C: Migrate>(
    conn: &mut C,
    table: &'static str,
    steps: &[Step],
) -> Result<(), MigrateError> {
    let only_mark_as_done = false;
    migrator(table, steps).run_direct(None, conn, only_mark_as_done).await
}

/// Undoes every step.
pub(super) async fn down<C: Migrate>(
    conn: &mut C,
    table: &'static str,
    steps: &[Step],
) -> Result<(), MigrateError> {
    let migrator = migrator(table, steps);
    conn.ensure_migrations_table(table).await?;
    let applied = conn.list_applied_migrations(table).await?;
    for migration in migrator.iter().rev().filter(|m| m.migration_type.is_down_migration()) {
        if applied.iter().any(|done| done.version == migration.version) {
            conn.revert(table, migration).await?;
        }
    }
    Ok(())
}

fn migrator(table: &'static str, steps: &[Step]) -> Migrator {
    let migration = |version, noun: &'static str, kind, sql: &'static str| {
        Migration::new(version, noun.into(), kind, SqlStr::from_static(sql), false)
    };
    let both = steps.iter().flat_map(|&(version, noun, up, down)| {
        [
            migration(version, noun, MigrationType::ReversibleUp, up),
            migration(version, noun, MigrationType::ReversibleDown, down),
        ]
    });
    let mut migrator = Migrator::with_migrations(both.collect());
    migrator.dangerous_set_table_name(table);
    // sqlx's own lock belongs to the session and would not survive a pooler.
    migrator.set_locking(false);
    // A newer version of this library may have been here, as in a rolling upgrade.
    migrator.set_ignore_missing(true);
    migrator
}

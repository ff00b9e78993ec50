//! Migrations: the schema, which binaries it serves, and whether this one is among them.

use crate::{Error, Result, Store};
use sqlx::migrate::{AppliedMigration, Migrate, MigrateError, Migrator};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

static MIGRATIONS: Migrator = sqlx::migrate!("../migrations");
/// The file that makes the roles of the database.
const ROLES: &str = include_str!("../../deploy/roles.sql");
/// The table in which sqlx records applied migrations.
const TABLE: &str = "_sqlx_migrations";

/// The oldest binary that this binary's schema serves, named by the newest migration that it knows. Raise it with a migration
/// that takes something away, when no binary below it still runs anywhere: expand first, contract a release later. Before the first
/// release there was none to wait for.
pub const OLDEST: i64 = 20261201090020;

/// How the schema and this binary fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// The schema is this binary's.
    Same {
        /// The oldest binary that it serves.
        oldest: i64,
    },
    /// A newer binary made it, and it serves this one too.
    Newer {
        /// Its newest migration.
        newest: i64,
        /// The oldest binary that it serves.
        oldest: i64,
    },
}

impl Fit {
    /// Says it in words.
    pub fn said(self) -> String {
        match self {
            Fit::Same { oldest } => {
                format!("the schema is this binary's ({}), and serves binaries from {oldest} on", number())
            }
            Fit::Newer { newest, oldest } => format!(
                "the schema is newer than this binary and serves it: it has migration {newest} and serves binaries from \
                 {oldest} on, and this one is {}",
                number()
            ),
        }
    }
}

/// The number of this binary: the newest migration that it knows.
pub fn number() -> i64 {
    MIGRATIONS.iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// One migration of this binary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    pub version: i64,
    pub description: String,
    pub applied: bool,
}

/// Creates the empty database `name` on the server of `admin_url`. The user needs the right to do so. `false`: it
/// exists already and was not changed.
///
/// # Errors
/// [`Error::Database`].
pub async fn create_database(admin_url: &str, name: &str) -> Result<bool> {
    let mut admin = PgConnection::connect(admin_url).await?;
    // sqlx cannot check these statements at compile time: the second takes no parameter.
    let exists = sqlx::query_scalar::<_, bool>("select exists (select from pg_database where datname = $1)")
        .bind(name)
        .fetch_one(&mut admin)
        .await?;
    if !exists {
        let create = format!("create database \"{}\"", name.replace('"', "\"\""));
        sqlx::query(AssertSqlSafe(create)).execute(&mut admin).await?;
    }
    admin.close().await?;
    Ok(!exists)
}

impl Store {
    /// Makes the roles of the database and gives them their rights, as `deploy/roles.sql` says. Needs a superuser.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn create_roles(&self) -> Result<()> {
        sqlx::raw_sql(ROLES).execute(&self.pool).await?;
        Ok(())
    }

    /// Applies the missing migrations in order. Several processes may call this at once; the later ones wait. Calls
    /// `progress` for each migration that this call applied, and returns their number.
    ///
    /// # Errors
    /// [`Error::Schema`] when the database is newer than the binary and does not serve it, when live workers are older than
    /// what the new schema serves, or when a migration failed. Earlier migrations stay applied.
    pub async fn migrate(&self, progress: impl Fn(&Migration)) -> Result<usize> {
        self.migrate_and(false, progress).await
    }

    /// The same. `leave_behind`: also when live workers are older than what the new schema serves.
    ///
    /// # Errors
    /// As [`Store::migrate`].
    pub async fn migrate_and(&self, leave_behind: bool, progress: impl Fn(&Migration)) -> Result<usize> {
        // Uses its own connection: a migration may take longer than the pool's time limits, and the schema lock ends
        // with the connection in every case.
        let unlimited = ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"];
        let mut connection = self.server.connect(&unlimited.map(|limit| (limit, "0"))).await?;
        connection.lock().await.map_err(failed)?;
        // Read under the lock, so that a migration that another process has just applied is not applied twice.
        connection.ensure_migrations_table(TABLE).await.map_err(failed)?;
        if let Some(version) = connection.dirty_version(TABLE).await.map_err(failed)? {
            return Err(Error::Schema(format!("migration {version} was left half-done: repair it by hand")));
        }
        let applied = applied(&mut connection).await?;
        if let Some(newest) = newest_unknown(&applied) {
            // A schema that serves this binary needs nothing of it.
            served(&mut connection, newest, &missing(&applied)).await?;
            return Ok(0);
        }
        may_set_space(&mut connection, &applied).await?;
        let serves = oldest(&mut connection).await?;
        if !leave_behind && serves.is_some_and(|oldest| oldest < OLDEST) {
            nobody_left_behind(&mut connection).await?;
        }
        let mut count = 0;
        for migration in MIGRATIONS.iter() {
            match applied.iter().find(|one| one.version == migration.version) {
                Some(one) if one.checksum == migration.checksum => {}
                Some(one) => return Err(failed(MigrateError::VersionMismatch(one.version))),
                None => {
                    connection.apply(TABLE, migration).await.map_err(failed)?;
                    count += 1;
                    progress(&Migration {
                        version: migration.version,
                        description: migration.description.to_string(),
                        applied: true,
                    });
                }
            }
        }
        if serves.is_none_or(|oldest| oldest < OLDEST) {
            sqlx::query!("update schema_serves set oldest = $1 where oldest < $1", OLDEST)
                .execute(&mut connection)
                .await?;
        }
        connection.close().await?;
        Ok(count)
    }

    /// Returns every migration of this binary, and whether it was applied.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn migrations(&self) -> Result<Vec<Migration>> {
        let applied = applied(&mut *self.pool.acquire().await?).await?;
        Ok(MIGRATIONS
            .iter()
            .map(|migration| Migration {
                version: migration.version,
                description: migration.description.to_string(),
                applied: applied.iter().any(|one| one.version == migration.version),
            })
            .collect())
    }

    /// Returns how schema and binary fit: the schema is this binary's, or a newer one that serves it.
    ///
    /// # Errors
    /// [`Error::Schema`] for an older schema and for a newer one that does not serve this binary, with the remedy.
    pub async fn check_schema(&self) -> Result<Fit> {
        let mut connection = self.pool.acquire().await?;
        let applied = applied(&mut connection).await?;
        let missing = missing(&applied);
        if let Some(newest) = newest_unknown(&applied) {
            return served(&mut connection, newest, &missing).await;
        }
        match missing.len() {
            0 => Ok(Fit::Same { oldest: oldest(&mut connection).await?.unwrap_or(OLDEST) }),
            count => Err(Error::Schema(format!(
                "the database's schema is older than this binary: {count} migrations are missing, from {}. Run `wakeful migrate`.",
                missing[0]
            ))),
        }
    }
}

/// The newest applied migration that this binary does not know.
fn newest_unknown(applied: &[AppliedMigration]) -> Option<i64> {
    let unknown = applied.iter().filter(|one| !MIGRATIONS.version_exists(one.version));
    unknown.map(|one| one.version).max()
}

/// Checks that this role may make the functions that see all spaces (`set wakeful.space = '*'`). Postgres allows that to
/// superusers, and to roles that were given the right.
async fn may_set_space(connection: &mut PgConnection, applied: &[AppliedMigration]) -> Result<()> {
    let missing = missing(applied);
    let asks = MIGRATIONS
        .iter()
        .any(|one| missing.contains(&one.version) && one.sql.as_str().contains("set wakeful.space"));
    if !asks {
        return Ok(());
    }
    let right = sqlx::query!(
        r#"select has_parameter_privilege('wakeful.space', 'set') as "granted!", quote_ident(current_user) as "role!""#
    )
    .fetch_one(connection)
    .await?;
    if right.granted {
        return Ok(());
    }
    Err(Error::Schema(format!(
        "the role {role} may not make functions that set wakeful.space, and nothing was migrated. A superuser gives it the right: \
         grant set on parameter wakeful.space to {role}",
        role = right.role
    )))
}

fn missing(applied: &[AppliedMigration]) -> Vec<i64> {
    let is_applied = |version: i64| applied.iter().any(|one| one.version == version);
    MIGRATIONS.iter().map(|migration| migration.version).filter(|version| !is_applied(*version)).collect()
}

/// Returns how a schema with the unknown migration `newest` fits.
async fn served(connection: &mut PgConnection, newest: i64, missing: &[i64]) -> Result<Fit> {
    let newer = "the database's schema is newer than this binary";
    if let Some(missing) = missing.first() {
        return Err(Error::Schema(format!(
            "{newer}, which does not know its migration {newest}, and lacks the binary's {missing}: they were built from \
             different sources. Use a binary that knows both."
        )));
    }
    match oldest(connection).await? {
        Some(oldest) if oldest <= number() => Ok(Fit::Newer { newest, oldest }),
        Some(oldest) => Err(Error::Schema(format!(
            "{newer} and does not serve it any more: it has migration {newest} and serves binaries from {oldest} on, and this \
             one is {}. Use the newer binary.",
            number()
        ))),
        None => Err(Error::Schema(format!(
            "{newer}: it has migration {newest}, which this binary does not know. Use the newer binary."
        ))),
    }
}

/// The oldest binary that the schema serves. `None`: it does not say.
async fn oldest(connection: &mut PgConnection) -> Result<Option<i64>> {
    let says = sqlx::query_scalar!("select to_regclass('schema_serves') is not null")
        .fetch_one(&mut *connection)
        .await?;
    if says != Some(true) {
        return Ok(None);
    }
    Ok(sqlx::query_scalar!("select oldest from schema_serves").fetch_optional(connection).await?)
}

/// Refuses to take the schema away from workers that are alive.
async fn nobody_left_behind(connection: &mut PgConnection) -> Result<()> {
    let left = sqlx::query_scalar!(
        "select worker_id from workers
        where beat_at > clock_timestamp() - interval '1 minute' and coalesce(schema_number, 0) < $1
        order by worker_id",
        OLDEST
    )
    .fetch_all(connection)
    .await?;
    if left.is_empty() {
        return Ok(());
    }
    Err(Error::Schema(format!(
        "the new schema serves binaries from {OLDEST} on, and {} live workers are older: {}. Drain them (`wakeful worker drain \
         NAME`), or migrate with --leave-behind.",
        left.len(),
        left.join(", ")
    )))
}

async fn applied(connection: &mut PgConnection) -> Result<Vec<AppliedMigration>> {
    let exists = sqlx::query_scalar!("select to_regclass('_sqlx_migrations') is not null")
        .fetch_one(&mut *connection)
        .await?;
    if exists != Some(true) {
        return Ok(Vec::new());
    }
    connection
        .list_applied_migrations(TABLE)
        .await
        .map_err(|error| Error::Schema(format!("the table of migrations cannot be read: {error}")))
}

fn failed(error: MigrateError) -> Error {
    Error::Schema(format!("migration failed: {error}"))
}

//! Migrations: the schema, and whether it is the one that this binary was built for.

use crate::{Error, Result, Store};
use sqlx::migrate::{AppliedMigration, Migrate, MigrateError, Migrator};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

static MIGRATIONS: Migrator = sqlx::migrate!("../migrations");
/// The table in which sqlx records applied migrations.
const TABLE: &str = "_sqlx_migrations";

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
    /// Applies the missing migrations in order. Several processes may call this at once; the later ones wait. Calls
    /// `progress` for each migration that this call applied, and returns their number.
    ///
    /// # Errors
    /// [`Error::Schema`] when the database is newer than the binary or a migration failed. Earlier migrations stay
    /// applied.
    pub async fn migrate(&self, progress: impl Fn(&Migration)) -> Result<usize> {
        // Uses its own connection: a migration may take longer than the pool's time limits, and the schema lock ends
        // with the connection in every case.
        let mut connection = self.server.connect(&[("statement_timeout", "0")]).await?;
        connection.lock().await.map_err(failed)?;
        // Read under the lock, so that a migration that another process has just applied is not applied twice.
        connection.ensure_migrations_table(TABLE).await.map_err(failed)?;
        if let Some(version) = connection.dirty_version(TABLE).await.map_err(failed)? {
            return Err(Error::Schema(format!("migration {version} was left half-done: repair it by hand")));
        }
        let applied = applied(&mut connection).await?;
        if let Some(newer) = newer_than_binary(&applied) {
            return Err(Error::Schema(newer));
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

    /// Returns an error unless the schema is exactly this binary's.
    ///
    /// # Errors
    /// [`Error::Schema`], for an older and for a newer schema, with the remedy.
    pub async fn check_schema(&self) -> Result<()> {
        let applied = applied(&mut *self.pool.acquire().await?).await?;
        if let Some(newer) = newer_than_binary(&applied) {
            return Err(Error::Schema(newer));
        }
        let missing: Vec<i64> =
            self.migrations().await?.into_iter().filter(|one| !one.applied).map(|one| one.version).collect();
        match missing.len() {
            0 => Ok(()),
            count => Err(Error::Schema(format!(
                "the database's schema is older than this binary: {count} migrations are missing, from {}. Run `wakeful migrate`.",
                missing[0]
            ))),
        }
    }
}

fn newer_than_binary(applied: &[AppliedMigration]) -> Option<String> {
    let unknown = applied.iter().rfind(|one| !MIGRATIONS.version_exists(one.version))?;
    Some(format!(
        "the database's schema is newer than this binary: it has migration {}, which this binary does not know. Use the newer binary.",
        unknown.version
    ))
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

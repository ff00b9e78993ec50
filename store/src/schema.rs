//! Migrations: what the schema is, and whether it is the one that this binary was built for.

use crate::{Error, Result, Store};
use sqlx::migrate::{Migrate, Migrator};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

static MIGRATIONS: Migrator = sqlx::migrate!("../migrations");

/// One migration of this binary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    pub version: i64,
    pub description: String,
    pub applied: bool,
}

/// Makes the empty database `name` on the server of `admin_url`, whose user may do that. `false`: it is there already,
/// and is left as it is.
///
/// # Errors
/// [`Error::Database`].
pub async fn create_database(admin_url: &str, name: &str) -> Result<bool> {
    let mut admin = PgConnection::connect(admin_url).await?;
    // Neither statement can be checked when this is compiled: the second takes no parameter.
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
    /// Brings the schema up to this binary's, one migration after the other; several processes may try at once.
    /// `progress` is told of each that is applied. Gives how many were.
    ///
    /// # Errors
    /// [`Error::Schema`] when the database is newer than the binary or a migration failed: what was applied before it stays.
    pub async fn migrate(&self, progress: impl Fn(&Migration)) -> Result<usize> {
        let status = self.migrations().await?;
        if let Some(newer) = self.newer_than_binary().await? {
            return Err(Error::Schema(newer));
        }
        let pending: Vec<&Migration> = status.iter().filter(|migration| !migration.applied).collect();
        MIGRATIONS
            .run(&self.pool)
            .await
            .map_err(|error| Error::Schema(format!("migration failed: {error}")))?;
        pending.iter().for_each(|migration| progress(migration));
        Ok(pending.len())
    }

    /// Every migration of this binary, and whether it was applied.
    ///
    /// # Errors
    /// [`Error::Database`].
    pub async fn migrations(&self) -> Result<Vec<Migration>> {
        let applied = self.applied().await?;
        Ok(MIGRATIONS
            .iter()
            .map(|migration| Migration {
                version: migration.version,
                description: migration.description.to_string(),
                applied: applied.contains(&migration.version),
            })
            .collect())
    }

    /// Fails unless the schema is exactly this binary's.
    ///
    /// # Errors
    /// [`Error::Schema`] with what to do, for an older and for a newer one.
    pub async fn check_schema(&self) -> Result<()> {
        if let Some(newer) = self.newer_than_binary().await? {
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

    async fn newer_than_binary(&self) -> Result<Option<String>> {
        let unknown: Vec<i64> = self
            .applied()
            .await?
            .into_iter()
            .filter(|version| !MIGRATIONS.version_exists(*version))
            .collect();
        Ok(unknown.last().map(|version| {
            format!(
                "the database's schema is newer than this binary: it has migration {version}, which this binary does not know. Use the newer binary."
            )
        }))
    }

    async fn applied(&self) -> Result<Vec<i64>> {
        let mut connection = self.pool.acquire().await?;
        let exists = sqlx::query_scalar!("select to_regclass('_sqlx_migrations') is not null")
            .fetch_one(&mut *connection)
            .await?;
        if exists != Some(true) {
            return Ok(Vec::new());
        }
        let applied = connection
            .list_applied_migrations("_sqlx_migrations")
            .await
            .map_err(|error| Error::Schema(format!("the table of migrations cannot be read: {error}")))?;
        Ok(applied.into_iter().map(|migration| migration.version).collect())
    }
}

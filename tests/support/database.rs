//! A database for one test, copied from a migrated template, and dropped after it.

use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::str::FromStr;
use wakeful_store::Store;

pub struct Database {
    pub name: String,
    pub url: String,
    /// For reading what the process under test has written.
    pub pool: PgPool,
    admin_url: String,
}

/// What the columns of a step's tables may hold. An installation does without these conditions.
const CHECKS: &str = include_str!("checks.sql");

/// The roles of a deployed database.
pub const ROLES: &str = include_str!("../../deploy/roles.sql");

impl Database {
    /// Ends all connections to this database, and refuses new ones.
    pub async fn refuse_connections(&self) {
        let mut admin = PgConnection::connect(&self.admin_url).await.expect("the server of the tests");
        let closed = format!("alter database \"{}\" allow_connections false", self.name);
        sqlx::raw_sql(AssertSqlSafe(closed)).execute(&mut admin).await.expect("it is closed");
        sqlx::query("select pg_terminate_backend(pid) from pg_stat_activity where datname = $1")
            .bind(&self.name)
            .execute(&mut admin)
            .await
            .expect("its connections end");
    }

    pub async fn new() -> Database {
        Database::on(&admin_url(), "pg_default").await
    }

    /// Like [`Database::new`], on another server, in one of its tablespaces.
    pub async fn on(admin_url: &str, tablespace: &str) -> Database {
        let mut admin = connect(admin_url).await;
        let template = template(&mut admin, admin_url).await;
        let name = format!("wakeful_test_{}", uuid_like());
        let create =
            format!("create database {name} template {template} strategy file_copy tablespace {tablespace}");
        run(&mut admin, create).await;
        Database::open(admin_url.to_owned(), name).await
    }

    /// A database that sorts texts as ICU does, with this build's migrations. `None`: the server knows no ICU.
    pub async fn sorted_by_icu() -> Option<Database> {
        let admin_url = admin_url();
        let name = format!("wakeful_test_{}", uuid_like());
        let mut admin = connect(&admin_url).await;
        let knows: bool =
            sqlx::query_scalar("select exists (select from pg_collation where collprovider = 'i')")
                .fetch_one(&mut admin)
                .await
                .expect("pg_collation");
        if !knows {
            return None;
        }
        let create =
            format!("create database {name} template template0 locale_provider icu icu_locale 'en-x-icu'");
        run(&mut admin, create).await;
        let database = Database::open(admin_url, name).await;
        let store = Store::connect(&database.url, 2, "wakeful test").await.expect("the test's database");
        store.migrate(|_| {}).await.expect("the migrations apply");
        store.close().await;
        Some(database)
    }

    /// Gives the database the roles of deploy/.
    pub async fn with_roles(&self) {
        // The tables change their owner, which may deadlock with what a server reads at this moment.
        for _ in 0..10 {
            match sqlx::raw_sql(ROLES).execute(&self.pool).await {
                Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("40P01") => {}
                made => {
                    made.expect("the roles are made");
                    return;
                }
            }
        }
        panic!("the roles are not made: a deadlock each time");
    }

    /// The address of the database for a role. The server of the tests asks for no password.
    pub fn as_role(&self, role: &str) -> String {
        let (scheme, rest) = self.url.split_once("://").expect("a URL");
        let host = rest.split_once('@').map_or(rest, |(_, host)| host);
        format!("{scheme}://{role}@{host}")
    }

    /// A database without any table.
    pub async fn without_schema() -> Database {
        let admin_url = admin_url();
        let name = format!("wakeful_test_{}", uuid_like());
        let mut admin = connect(&admin_url).await;
        run(&mut admin, format!("create database {name} template template0")).await;
        Database::open(admin_url, name).await
    }

    async fn open(admin_url: String, name: String) -> Database {
        let url = url_of(&admin_url, &name);
        let pool = PgPoolOptions::new().max_connections(4).connect(&url).await.expect("the test's database");
        Database { name, url, pool, admin_url }
    }

    pub async fn store(&self) -> Store {
        Store::connect(&self.url, 8, "wakeful test").await.expect("the test's database")
    }

    /// One value.
    pub async fn value<T>(&self, sql: &'static str, argument: &str) -> T
    where
        T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
    {
        sqlx::query_scalar(sql).bind(argument).fetch_one(&self.pool).await.expect(sql)
    }

    /// The number of rows of each table. Leaves out `workers`, which has a row for each running worker, `schema_serves`, the audit,
    /// which has refused requests too, and what the search fills beside the steps.
    pub async fn rows(&self) -> BTreeMap<String, i64> {
        let tables: Vec<String> = sqlx::query_scalar(
            "select tablename::text from pg_tables
            where schemaname = 'public' and tablename not in ('workers', 'audit_log', 'schema_serves')
                and tablename not in ('search_sessions', 'search_documents', 'search_due', 'search_progress', 'run_failures',
                    'error_groups', 'error_hours', 'transitions')",
        )
        .fetch_all(&self.pool)
        .await
        .expect("pg_tables");
        let mut rows = BTreeMap::new();
        for table in tables {
            let count = AssertSqlSafe(format!("select count(*) from {table}"));
            let count = sqlx::query_scalar(count).fetch_one(&self.pool).await.expect("a count");
            rows.insert(table, count);
        }
        rows
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (admin_url, name) = (self.admin_url.clone(), self.name.clone());
        // The test's runtime may be ending here, so the last statement gets a runtime of its own.
        let dropped = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let mut admin = connect(&admin_url).await;
                run(&mut admin, format!("drop database if exists {name} with (force)")).await;
            });
        });
        let _ = dropped.join();
    }
}

fn admin_url() -> String {
    std::env::var("WAKEFUL_TEST_DATABASE_URL")
        .expect("no Postgres for the tests: run them by `make test`, or under the program `with_postgres`")
}

/// The name of the template with this build's migrations. The first test that needs it makes it.
async fn template(admin: &mut PgConnection, admin_url: &str) -> String {
    let mut hasher = DefaultHasher::new();
    for entry in ["sessions", "logs", "effects", "queue"] {
        entry.hash(&mut hasher);
    }
    for migration in migrations() {
        migration.hash(&mut hasher);
    }
    CHECKS.hash(&mut hasher);
    let name = format!("wakeful_template_{:016x}", hasher.finish());
    run(admin, "select pg_advisory_lock(7070)".to_owned()).await;
    let exists: bool =
        sqlx::query_scalar("select exists (select from pg_database where datname = $1 and datistemplate)")
            .bind(&name)
            .fetch_one(&mut *admin)
            .await
            .expect("pg_database");
    if !exists {
        run(admin, format!("drop database if exists {name}")).await;
        run(admin, format!("create database {name} template template0")).await;
        let store = Store::connect(&url_of(admin_url, &name), 2, "wakeful test").await.expect("the template");
        store.migrate(|_| {}).await.expect("the migrations apply");
        store.close().await;
        let mut made = connect(&url_of(admin_url, &name)).await;
        sqlx::raw_sql(CHECKS).execute(&mut made).await.expect("the conditions hold");
        made.close().await.expect("the connection closes");
        run(admin, format!("alter database {name} is_template true")).await;
    }
    run(admin, "select pg_advisory_unlock(7070)".to_owned()).await;
    name
}

fn migrations() -> Vec<String> {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../migrations");
    let mut files: Vec<_> =
        std::fs::read_dir(dir).expect("migrations").flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.iter().map(|file| std::fs::read_to_string(file).expect("a migration")).collect()
}

fn url_of(admin_url: &str, database: &str) -> String {
    let options = PgConnectOptions::from_str(admin_url).expect("WAKEFUL_TEST_DATABASE_URL is a Postgres URL");
    options.database(database).to_url_lossy().to_string()
}

async fn connect(url: &str) -> PgConnection {
    PgConnection::connect(url).await.expect("the tests' Postgres answers")
}

async fn run(connection: &mut PgConnection, sql: String) {
    sqlx::query(AssertSqlSafe(sql.clone())).execute(connection).await.expect(&sql);
}

fn uuid_like() -> String {
    wakeful_store::new_id("t").replace('-', "")
}

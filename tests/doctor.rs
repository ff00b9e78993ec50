//! What `wakeful doctor` says of a database that does not let the work be done (rights, writes, connections), and of a host's roles.

use crate::cli::run;
use crate::support::{Database, Options};
use serde_json::Value;
use sqlx::AssertSqlSafe;
use wakeful_store::Store;

async fn sql(database: &Database, text: String) {
    sqlx::raw_sql(AssertSqlSafe(text)).execute(&database.pool).await.expect("the statement");
}

/// The findings of `doctor` under this name that are no `ok`: level, text and remedy.
async fn findings(url: &str, name: &str) -> Vec<[String; 3]> {
    let ran = run(&Options::new().model("scripted/demo"), url, &["doctor", "-o", "json"]).await;
    let report = ran.json();
    let found = report.as_array().expect("checks").iter();
    let found = found.filter(|check| check["name"] == name && check["level"] != "ok");
    let text = |check: &Value, key: &str| check[key].as_str().unwrap_or_default().to_owned();
    let found: Vec<[String; 3]> =
        found.map(|check| ["level", "text", "remedy"].map(|key| text(check, key))).collect();
    assert!(found.is_empty() || ran.code == 9, "{report:#}");
    found
}

/// A role that may do all that work needs, with a limit of connections (-1: none), and the database's address for it.
async fn worker(database: &Database, limit: i32) -> (String, String) {
    let role = wakeful_store::new_id("doctor").replace('-', "_");
    sql(database, format!("create role {role} login connection limit {limit} in role wakeful_runtime")).await;
    (database.as_role(&role), role)
}

#[tokio::test]
async fn each_right_that_the_runtime_role_lacks_is_named() {
    let database = Database::new().await;
    database.with_roles().await;
    let url = database.as_role("wakeful_runtime");
    let store = Store::connect(&url, 2, "wakeful test").await.unwrap();
    assert_eq!(store.lacked_rights().await.unwrap().of, []);
    assert_eq!(findings(&url, "rights").await, Vec::<[String; 3]>::new());

    sql(&database, "revoke delete, insert on jobs from wakeful_runtime".to_owned()).await;
    let [found] = findings(&url, "rights").await.try_into().expect("one finding");
    assert_eq!(found[0], "problem");
    assert!(
        found[1].contains("wakeful_runtime") && found[1].ends_with("It lacks delete, insert on jobs"),
        "{found:?}"
    );
    assert!(found[2].contains("deploy/roles.sql"), "{found:?}");

    // Every right that the file gives, and no other, is one that the doctor asks for.
    database.with_roles().await;
    let given: Vec<String> = sqlx::query_scalar(
        "select c.relname::text || ': ' || string_agg(lower(a.privilege_type), ',' order by lower(a.privilege_type))
        from pg_class c
        cross join lateral aclexplode(c.relacl) a
        where a.grantee = 'wakeful_runtime'::regrole and c.relnamespace = 'public'::regnamespace
            and (c.relkind in ('r', 'p') or c.relkind = 'S' and a.privilege_type = 'USAGE')
            and not exists (select from pg_depend d
                where d.objid = c.oid and d.deptype = 'i' and d.classid = 'pg_class'::regclass)
        group by c.relname
        order by c.relname::text collate \"C\"",
    )
    .fetch_all(&database.pool)
    .await
    .unwrap();
    assert!(given.len() > 50, "{given:?}");
    sql(
        &database,
        "revoke all on all tables in schema public from wakeful_runtime;
        revoke all on all sequences in schema public from wakeful_runtime"
            .to_owned(),
    )
    .await;
    let lacked = store.lacked_rights().await.unwrap().of;
    let mut lacked: Vec<String> =
        lacked.iter().map(|one| format!("{}: {}", one.of, one.rights.join(","))).collect();
    lacked.sort();
    assert_eq!(lacked, given);

    // A role that nobody gave anything, as when the file was never run for this database.
    sql(&database, "revoke usage on schema public from wakeful_runtime".to_owned()).await;
    let [found] = findings(&url, "rights").await.try_into().expect("one finding");
    assert!(found[1].ends_with("It lacks usage on schema public"), "{found:?}");
    store.close().await;
}

#[tokio::test]
async fn a_database_that_takes_no_writes_is_named_as_such() {
    let database = Database::new().await;
    assert_eq!(findings(&database.url, "writes").await, Vec::<[String; 3]>::new());
    let name = &database.name;
    sql(&database, format!("alter database {name} set default_transaction_read_only = on")).await;
    let [found] = findings(&database.url, "writes").await.try_into().expect("one finding");
    assert_eq!(found[0], "problem");
    assert!(
        found[1].contains("takes no writes") && found[2].contains("default_transaction_read_only"),
        "{found:?}"
    );
}

#[tokio::test]
async fn connections_that_are_used_up_are_named_as_such() {
    let database = Database::new().await;
    database.with_roles().await;
    // None at all, and fewer than the doctor needs.
    for limit in [0, 1] {
        let (url, role) = worker(&database, limit).await;
        let [found] = findings(&url, "connections").await.try_into().expect("one finding");
        assert_eq!(found[0], "problem", "{limit}");
        assert!(found[1].contains("too many connections") || limit == 1, "{found:?}");
        assert!(found[2].contains("connection limit") && found[2].contains("pg_stat_activity"), "{found:?}");
        assert_eq!(findings(&url, "database").await, Vec::<[String; 3]>::new(), "{limit}");
        sql(&database, format!("drop role {role}")).await;
    }
    // Enough for the doctor, and fewer than the workers want.
    let (url, role) = worker(&database, 5).await;
    sql(
        &database,
        "insert into workers (worker_id, host, pid, version, concurrency, connections) values ('w', 'h', 1, '0', 1, 8)"
            .to_owned(),
    )
    .await;
    let ran = run(&Options::new().model("scripted/demo"), &url, &["doctor"]).await;
    assert!(ran.out.contains("this role or this database may have 5"), "{}", ran.out);
    sql(&database, format!("drop role {role}")).await;
}

#[tokio::test]
async fn a_host_with_the_api_alone_needs_no_folder_for_files() {
    let database = Database::new().await;
    let options = Options::new().model("openai/test").env("WAKEFUL_WORKSPACE__DIR", "/dev/null/files");
    let ran = run(&options, &database.url, &["doctor"]).await;
    assert!(ran.code == 9 && ran.out.contains("PROBLEM\tworkspace\t/dev/null/files: "), "{}", ran.out);
    let ran = run(&options, &database.url, &["doctor", "--roles", "api"]).await;
    for name in ["workspace", "maildir", "model key"] {
        assert!(!ran.out.contains(&format!("\t{name}\t")), "{name}: {}", ran.out);
    }
    let process = options.arg("--roles=api").serve(&database).await;
    process.client().chat("c1", "Hello.").await;
    assert!(process.terminate().success());
}

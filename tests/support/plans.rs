//! What the product's own statements read, as Postgres says: on generated rows, and in the role that sends them.

use super::Database;
use serde_json::Value;

/// Rows that were read, kept or not.
pub fn read(plan: &Value) -> f64 {
    let number = |key: &str| plan[key].as_f64().unwrap_or_default();
    let kind = plan["Node Type"].as_str().unwrap_or_default();
    let own = match kind.contains("Scan") && kind != "CTE Scan" && kind != "Subquery Scan" {
        true => {
            (number("Actual Rows")
                + number("Rows Removed by Filter")
                + number("Rows Removed by Index Recheck"))
                * number("Actual Loops")
        }
        // What a join throws away was read for each of its rows.
        false => number("Rows Removed by Join Filter") * number("Actual Loops"),
    };
    own + plan["Plans"].as_array().into_iter().flatten().map(read).sum::<f64>()
}

/// The text of a statement of the store, as it is compiled in: the one in which these words stand.
pub fn shipped(words: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../.sqlx");
    let texts = std::fs::read_dir(folder).unwrap().map(|file| {
        let described: Value = serde_json::from_slice(&std::fs::read(file.unwrap().path()).unwrap()).unwrap();
        described["query"].as_str().unwrap().to_owned()
    });
    let mut found: Vec<String> = texts.filter(|text| text.contains(words)).collect();
    assert_eq!(found.len(), 1, "statements with {words:?}: {found:#?}");
    found.remove(0)
}

/// What a statement does with these values, planned for them, in a role and as a caller of this space. What it changes is rolled back.
pub async fn explain(database: &Database, role: &str, space: &str, text: &str, values: &[&str]) -> Value {
    let mut text = text.to_owned();
    for (n, value) in values.iter().enumerate().rev() {
        let parameter = format!("${}", n + 1);
        assert!(text.contains(&parameter), "no {parameter} for {value} in {text}");
        text = text.replace(&parameter, value);
    }
    let is_parameter = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
    assert!(!text.split('$').skip(1).any(is_parameter), "a parameter lacks its value in {text}");
    let mut tx = database.pool.begin().await.unwrap();
    let settings = format!(
        "set local role {role}; set local wakeful.space = '{space}'; set local enable_seqscan = off;
        set local enable_bitmapscan = off"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(settings)).execute(&mut *tx).await.unwrap();
    let text = format!("explain (analyze, verbose, timing off, format json) {text}");
    let plan: Value =
        sqlx::query_scalar(sqlx::AssertSqlSafe(text.clone())).fetch_one(&mut *tx).await.expect(&text);
    plan[0]["Plan"].clone()
}

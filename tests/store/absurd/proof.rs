//! `verify` names what an import lost or changed: rows are damaged as only a superuser can.

use super::*;

async fn damaged(world: &World, damage: &str) {
    let sql = format!("set session_replication_role = replica; {damage}; reset session_replication_role");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.database.pool).await.expect(damage);
}

/// What differs, each kind once.
async fn found(world: &World, source: &mut Source) -> Vec<String> {
    let row = world.store.absurd_imports("default", None, 10).await.unwrap().remove(0);
    let Compared::Differs { differences } =
        world.store.absurd_compare(source, &row, None, "").await.unwrap().result
    else {
        return Vec::new();
    };
    let mut kinds: Vec<String> = differences.into_iter().map(|one| one.what).collect();
    kinds.dedup();
    kinds
}

#[tokio::test]
async fn verify_names_each_kind_of_damage() {
    let (world, theirs) = (World::new().await, Theirs::new("absurd").await);
    let steps = [
        ("agent-loop", turn(1)),
        ("agent-loop#2", turn(2)),
        ("agent-loop#3", done()),
        ("send", json!({"id": 7})),
    ];
    let task = theirs.task(1, "completed", OVER, &steps).await;
    let mut source = theirs.source(May::Read).await;
    import(&world, &mut source, &task, false).await;
    assert_eq!(found(&world, &mut source).await, Vec::<String>::new());
    damaged(
        &world,
        "create table kept as select * from conversation_records; create table kept_calls as select * from tool_calls",
    )
    .await;
    let last = "(select max(message_number) from conversation_records)";
    let cases = [
        (
            "order",
            format!(
                "update conversation_records r set content = o.content, role = o.role, details = o.details
                from kept o where r.message_number in ({last} - 1, {last} - 3) and o.message_number = 2 * {last} - 4 - r.message_number"
            ),
        ),
        ("missing", format!("delete from conversation_records where message_number = {last}")),
        ("differs", format!("update conversation_records set content = '[{{\"type\": \"text\", \"text\": \"Else.\"}}]' where message_number = {last}")),
        ("ledger", "update tool_calls set call_id = 'other' where call_id = 'c2'".to_owned()),
        ("state", "update conversation_sessions set state = state || '{\"x\": 1}'".to_owned()),
    ];
    for (what, damage) in cases {
        damaged(&world, &damage).await;
        let kinds = found(&world, &mut source).await;
        assert!(kinds.iter().any(|kind| kind == what), "{what}: {kinds:?}");
        damaged(
            &world,
            "delete from conversation_records; insert into conversation_records select * from kept;
            delete from tool_calls; insert into tool_calls select * from kept_calls;
            update conversation_sessions set state = state - 'x'",
        )
        .await;
        assert_eq!(found(&world, &mut source).await, Vec::<String>::new(), "{what} is undone");
    }
}

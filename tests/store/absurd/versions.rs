//! Tables of other versions: they are read by their columns, and refused in words if one is missing.

use super::*;
use wakeful_store::Error;

#[tokio::test]
async fn a_version_says_its_word_and_old_tables_without_keys_are_read() {
    let (world, theirs) = (World::new().await, Theirs::new("absurd").await);
    let task = theirs.task(1, "completed", OVER, &[("agent-loop", done())]).await;
    // As before 0.0.6, and as each version since 0.2 names itself.
    theirs
        .run("alter table absurd.t_q drop column idempotency_key;
            create function absurd.get_schema_version () returns text language sql as $$ select 'main'::text $$")
        .await;
    let mut source = theirs.source(May::Read).await;
    assert_eq!(source.version(), "main");
    session_of(&import(&world, &mut source, &task, false).await);
    assert_eq!(equal(&world, &mut source).await, 1);
}

#[tokio::test]
async fn tables_of_an_unknown_version_are_refused_by_the_name_of_what_they_lack() {
    for (damage, lacks) in [
        ("alter table absurd.c_q rename column status to phase", "c_q.status"),
        ("alter table absurd.r_q drop column wake_event", "r_q.wake_event"),
        (
            "alter table absurd.t_q rename to t_p; insert into absurd.queues values ('p'); alter table absurd.t_p drop column params",
            "t_p.params",
        ),
    ] {
        let theirs = Theirs::new("absurd").await;
        theirs.run(damage).await;
        let refused = Source::open(&theirs.database.url, "wakeful test", May::Read).await.unwrap_err();
        assert!(matches!(refused, Error::Schema(_)), "{refused:?}");
        let said = refused.to_string();
        assert!(said.contains(&format!("lack {lacks}")) && said.contains("0.0.3 to 0.5"), "{said}");
    }
    // `durable` has no status, and is read.
    assert_eq!(Theirs::new("durable").await.source(May::Read).await.schema(), "durable");
}

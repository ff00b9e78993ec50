//! Slim steps: the messages are in a table of the program that Absurd served, and a step points at the last one.

use super::*;
use wakeful_workflow::absurd::shape::Shape;

const RECORDS: &str =
    "select body from conversation_records where conversation_id = $1 and message_number > $2
    and message_number <= $3 order by message_number";

fn slim(to: i64, finish: &str) -> Value {
    json!({"toMessageNumber": to, "finishReason": finish, "usage": {"inputTokens": 10 + to, "outputTokens": 1},
        "executedLocalToolCount": 0, "conversationUpdates": [{"key": "last", "value": to}]})
}

/// Three tasks, of which the first and the third are of one conversation. A slim step points at records of the program's table.
async fn filled() -> (World, Theirs, Source) {
    let (world, theirs) = (World::new().await, Theirs::new("absurd").await);
    theirs
        .run("create table conversation_records (conversation_id text, message_number bigint, body jsonb not null,
            primary key (conversation_id, message_number))")
        .await;
    let record = async |conversation: &str, number: i64, body: &Value| {
        sqlx::query("insert into conversation_records values ($1, $2, $3)")
            .bind(conversation)
            .bind(number)
            .bind(body)
            .execute(&theirs.database.pool)
            .await
            .unwrap();
    };
    let says = |role: &str, text: &str| json!({"role": role, "content": text});
    for (n, conversation, from) in [(1, "thread", 0), (2, "other", 0), (3, "thread", 4)] {
        record(conversation, from + 1, &says("user", &format!("Question {n}"))).await;
        for (at, message) in turn(n)["newMessages"].as_array().unwrap().iter().enumerate() {
            record(conversation, from + 2 + at as i64, message).await;
        }
        record(conversation, from + 4, &says("assistant", &format!("Done {n}."))).await;
        let steps = [("agent-loop", slim(from + 3, "tool-calls")), ("agent-loop#2", slim(from + 4, "stop"))];
        let task = theirs.task(n as u8, "completed", OVER, &steps).await;
        theirs
            .run(&format!(
                "update absurd.t_q set params = params || '{{\"conversationId\": \"{conversation}\"}}' where task_id = '{task}'"
            ))
            .await;
    }
    let source = theirs.source(May::Read).await;
    (world, theirs, source)
}

async fn bring(world: &World, source: &mut Source, n: u8, conversation: &str, records_sql: &str) -> Outcome {
    let (new, task) = (new_session(conversation, "task"), id(n, 1));
    let import = Import {
        new: &new,
        queue: "q",
        task_id: &task,
        shape: Some(&Shape::AgentLoop),
        records_sql,
        stopped: false,
    };
    world.store.absurd_import(source, &import).await.unwrap()
}

async fn compared(world: &World, source: &mut Source, row: &ImportRow) -> Compared {
    world.store.absurd_compare(source, row, None, RECORDS).await.unwrap().result
}

#[tokio::test]
async fn a_slim_task_gets_its_own_messages_and_none_of_an_earlier_task() {
    let (world, _theirs, mut source) = filled().await;
    for (n, conversation) in [(1, "thread"), (2, "other"), (3, "thread")] {
        let outcome = bring(&world, &mut source, n, conversation, RECORDS).await;
        let hydrated = world.store.hydrate(session_of(&outcome).0).await.unwrap();
        let said: Vec<String> = hydrated.records.iter().map(|record| record.text()).collect();
        assert_eq!(
            said[said.len() - 4..],
            [format!("Question {n}"), String::new(), format!("seen {n}"), format!("Done {n}.")]
        );
        let own: i64 = world
            .database
            .value("select count(*) from conversation_records where session_id = $1", session_of(&outcome).0)
            .await;
        assert_eq!(own, 4, "{said:?}");
        let last = if n == 3 { 8 } else { 4 };
        assert_eq!(hydrated.state["last"], json!(last));
        let input: i64 = world
            .database
            .value(
                "select total_input_tokens from conversation_sessions where session_id = $1",
                session_of(&outcome).0,
            )
            .await;
        assert_eq!(input, 10 + last - 1 + 10 + last);
    }
    let rows = world.store.absurd_imports("default", None, 10).await.unwrap();
    for row in &rows {
        assert_eq!(compared(&world, &mut source, row).await, Compared::Equal { messages: 4 });
    }
    assert_eq!(rows.len(), 3);
}

#[tokio::test]
async fn a_slim_task_whose_messages_cannot_be_read_stays_and_says_why() {
    let (world, theirs, mut source) = filled().await;
    let before = world.dump().await;
    let why = async |source: &mut Source, sql: &str| {
        let Outcome::Cannot(why) = bring(&world, source, 3, "thread", sql).await else { panic!("it came") };
        why
    };
    let said = why(&mut source, "").await;
    assert!(
        said.contains("agent-loop: the messages are elsewhere, up to number 7: set `records_sql`"),
        "{said}"
    );
    let said = why(&mut source, "select body from conversation_records where $1 = '' and $2 = $3 + 1").await;
    assert!(said.contains("finds no message of thread above 4 and up to 7"), "{said}");
    theirs.run("update absurd.t_q set params = params - 'conversationId'").await;
    let said = why(&mut source, RECORDS).await;
    assert!(said.contains("the params name no conversation"), "{said}");
    assert_eq!(world.dump().await, before, "nothing was written");
}

#[tokio::test]
async fn verify_finds_what_differs_from_the_programs_own_table() {
    let (world, theirs, mut source) = filled().await;
    bring(&world, &mut source, 1, "thread", RECORDS).await;
    let row = world.store.absurd_imports("default", None, 10).await.unwrap().remove(0);
    let found = async |source: &mut Source| match compared(&world, source, &row).await {
        Compared::Differs { differences } => differences.into_iter().map(|one| one.what).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    theirs.run("update conversation_records set body = jsonb_set(body, '{content}', '\"Else\"') where message_number = 1").await;
    assert_eq!(found(&mut source).await, ["differs"]);
    theirs.run("delete from conversation_records where message_number = 1").await;
    assert_eq!(found(&mut source).await, ["count", "extra"]);
}

#[tokio::test]
async fn a_checkpoint_that_goes_away_between_two_pages_is_an_error_and_no_gap() {
    let (_world, theirs, mut source) = filled().await;
    let task = id(1, 1);
    let (_, listed) = source.task("q", &task).await.unwrap().unwrap();
    assert_eq!(source.states("q", &task, &listed).await.unwrap().len(), 2);
    theirs.run("delete from absurd.c_q where checkpoint_name = 'agent-loop'").await;
    let error = source.states("q", &task, &listed).await.unwrap_err().to_string();
    assert!(error.contains("went away"), "{error}");
}

//! What a stream's readers see when processes and chunks are lost.

use super::*;

#[tokio::test]
async fn a_reader_ends_with_the_final_text_when_worker_and_api_die_at_once() {
    for prefilled in [false, true] {
        let database = Database::new().await;
        let model = speaking(Protocol::Anthropic).await;
        let options = options(&model, prefilled);
        // API and worker are one process. It dies after two pieces of text.
        let process = options.clone().env("FAILPOINTS", "K8=2*off->1*return").serve(&database).await;
        let client = process.client();
        model.hold_after(before_text(&model));
        let id = id(&client.chat("c1", "Tell me a story.").await);
        let mut reader = Reader::open(&client, &id, None).await;
        let mut seen = show(&model, &mut reader, 2).await;
        model.hold_after(before_text(&model) + 3);
        while let Some(frame) = reader.next().await {
            seen.push(frame);
        }
        assert!(whole().starts_with(&shown(&seen)), "half of it at most");
        let (status, _process) = process.ended().await;
        assert!(!status.success());
        model.release();

        let process = options.serve(&database).await;
        let last = seen.iter().filter_map(|frame| frame.id).max();
        let mut reader = Reader::open(&process.client(), &id, last).await;
        seen.extend(reader.until("checkpoint").await);
        assert_frames(&seen, &whole());
        assert!(process.terminate().success());
        let survived = finished(&database, &id, &model, &options).await;
        assert_eq!(survived.reply(), whole());
    }
}

#[tokio::test]
async fn a_reader_that_was_shown_what_the_database_lost_is_told_to_forget_it() {
    let database = Database::new().await;
    let model = speaking(Protocol::Anthropic).await;
    let options = options(&model, false);
    let process = options.serve(&database).await;
    let client = process.client();
    // Two events before the first text, then three pieces.
    model.hold_after(5);
    let id = id(&client.chat("c1", "Tell me a story.").await);
    let mut reader = Reader::open(&client, &id, None).await;
    let mut seen = Vec::new();
    while shown(&seen) != pieces()[..3].concat() {
        seen.push(reader.next().await.unwrap());
    }
    lose(&database, &id, "delete from generation_chunks where session_id = $1 and chunk_no > 0").await;
    let again = reader.until("gen_chunk").await;
    // The reset must come within the same attempt. The held call times out in the end, and the next attempt
    // resets in any case.
    assert_eq!((again[0].event.as_str(), &again[0].data["attempt"]), ("gen_reset", &json!(1)), "{again:?}");
    assert_eq!(shown(&again), pieces()[0], "the chunks that are left are shown again");
    seen.extend(again);

    // The worker is alive: with its next chunk it writes the lost ones again.
    model.hold_after(6);
    while shown(&seen) != whole() {
        seen.push(reader.next().await.unwrap());
    }
    assert!(seen.iter().all(|frame| frame.event != "gen_complete"));
    model.release();
    seen.extend(reader.until("checkpoint").await);
    assert_frames(&seen, &whole());
    assert!(process.terminate().success());
    finished(&database, &id, &model, &options).await;
}

#[tokio::test]
async fn a_reader_of_a_model_call_that_the_database_lost_is_told_to_forget_it() {
    let database = Database::new().await;
    let model = speaking(Protocol::Anthropic).await;
    let options = options(&model, false);
    let process = options.serve(&database).await;
    let client = process.client();
    model.hold_after(4);
    let id = id(&client.chat("c1", "Tell me a story.").await);
    let mut reader = Reader::open(&client, &id, None).await;
    let mut seen = Vec::new();
    while shown(&seen) != pieces()[..2].concat() {
        seen.push(reader.next().await.unwrap());
    }
    let both = "with g as (delete from generations where session_id = $1)
        delete from generation_chunks where session_id = $1";
    lose(&database, &id, both).await;
    let reset = reader.next().await.unwrap();
    assert_eq!((reset.event.as_str(), &reset.data["generation_id"]), ("gen_reset", &Value::Null));
    model.release();
    let rest = reader.until("checkpoint").await;
    assert!(
        rest.iter().all(|frame| frame.id.is_some()),
        "an answer that cannot be shown whole is not shown at all: {rest:?}"
    );
    assert_eq!(last_text(&rest), whole());
    assert!(process.terminate().success());
    finished(&database, &id, &model, &options).await;
}

#[tokio::test]
async fn a_silent_stream_shows_that_it_lives_as_often_as_is_configured() {
    let database = Database::new().await;
    let model = speaking(Protocol::Anthropic).await;
    let process = model.options().env("WAKEFUL_SERVER__SSE_HEARTBEAT_S", "1").serve(&database).await;
    let client = process.client();
    let id = id(&client.chat("c1", "Tell me a story.").await);
    client.wait_for(&id, "completed").await;
    let mut reader = Reader::open(&client, &id, None).await;
    reader.until("checkpoint").await;
    // With the default of 15 s, five comments would exceed the test's time limit.
    for _ in 0..5 {
        assert_eq!(reader.comment().await, "alive");
    }
    assert!(process.terminate().success());
}

async fn lose(database: &Database, id: &str, sql: &'static str) {
    let lost = sqlx::query(sql).bind(id).execute(&database.pool).await.unwrap();
    assert!(lost.rows_affected() > 0);
}

//! Deliveries across a crash: compares the channel's own ledger, a file, with the outbox and the journal. K12
//! to K16 of the crash matrix.

mod ends;

use crate::support::checker::{Traces, dump};
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, Program, eventually};
use serde_json::{Value, json};

/// A world whose mail uses the channel of `fixture_worker`. Each message gets a mail with its text as
/// subject, and a reply.
struct Office {
    database: Database,
    model: ModelServer,
    options: Options,
    session_id: String,
}

impl Office {
    /// `behaviour` is `idempotent`, `guarded` or `askable`.
    async fn new(behaviour: &str) -> Office {
        let model = ModelServer::start(|body, _| {
            if crate::support::model::turns_since_user(body) > 0 {
                return Answer::text("It is on its way.");
            }
            let messages = body["messages"].as_array().unwrap();
            // In the request, a note about a failed mail may follow the user's message. Skip such notes.
            let said = messages.iter().rev().filter(|message| message["role"] == "user");
            let mut said = said.map(|message| message["content"].as_str().unwrap());
            let asked = said.find(|text| !text.starts_with("[A note of the system")).unwrap();
            let mail = json!({"to": ["ann@example.org"], "subject": asked, "body": "As asked."});
            Answer::call("compose_email", mail)
        })
        .await;
        let options = Options::new().model("openai/test").env("OPENAI_BASE_URL", &model.url);
        let options = options.env("WAKEFUL_EMAIL__MAX_AGE_S", "600").env("FIXTURE_POST", behaviour);
        let path = |name: &str| options.path(name).display().to_string();
        let (sent, says) = (path("sent"), path("says"));
        let options = options.env("FIXTURE_SENT", sent).env("FIXTURE_POST_SAYS", says);
        Office { database: Database::new().await, model, options, session_id: String::new() }
    }

    async fn serve(&self) -> Process {
        self.options.serve(&self.database).await
    }

    /// Posts a message. Its run ends even if the mail cannot be sent.
    async fn ask(&mut self, client: &Client, text: &str) {
        let answer = client.chat("office", text).await;
        self.session_id = answer["session_id"].as_str().unwrap().to_owned();
    }

    /// Asks a process for a mail; the process dies at `failpoint`.
    async fn dies(&mut self, failpoint: &str) {
        let process = self.options.clone().env("FAILPOINTS", failpoint).serve(&self.database).await;
        self.ask(&process.client(), "First").await;
        let (status, process) = process.ended().await;
        assert!(!status.success() && process.log().contains("failpoint"), "{}", process.log());
    }

    /// Starts the next process, and waits until every delivery has ended.
    async fn comes_back(&self) -> Process {
        let process = self.serve().await;
        process.client().wait_for(&self.session_id, "completed").await;
        self.is_done().await;
        process
    }

    async fn is_done(&self) {
        eventually("every job to end", || async {
            let jobs: i64 = self.database.value("select count(*) from jobs where $1 <> ''", "all").await;
            (jobs == 0).then_some(())
        })
        .await;
    }

    fn says(&self, answer: &str) {
        std::fs::write(self.options.path("says"), answer).unwrap();
    }

    /// The channel's ledger: (key, subject), one row per attempt.
    fn sent(&self) -> Vec<(String, String)> {
        let text = std::fs::read_to_string(self.options.path("sent")).unwrap_or_default();
        let pair =
            |line: &str| line.split_once(' ').map(|(key, of)| (key.to_owned(), of.to_owned())).unwrap();
        text.lines().map(pair).collect()
    }

    /// The outbox: (status, last_error), in order.
    async fn outbox(&self) -> Vec<(String, Option<String>)> {
        sqlx::query_as("select status, last_error from deliveries order by ordinal")
            .fetch_all(&self.database.pool)
            .await
            .unwrap()
    }

    async fn run_sql(&self, statement: &'static str) {
        sqlx::query(statement).execute(&self.database.pool).await.unwrap();
    }

    /// Lets time pass for the first delivery: makes it, and its attempt, an hour older.
    async fn an_hour_later(&self) {
        sqlx::query(
            "update deliveries set created_at = created_at - interval '1 hour', not_after = not_after - interval '1 hour',
                sending_at = sending_at - interval '1 hour', settled_by = settled_by - interval '1 hour'",
        )
        .execute(&self.database.pool)
        .await
        .unwrap();
    }

    /// The journal's entries about deliveries: the type, and the status where an entry has one.
    async fn journal(&self) -> Vec<String> {
        let traces = Traces::of(&self.database, &self.session_id).await;
        let ends = traces.events.iter().filter(|event| event["payload"]["delivery_id"].is_string());
        let words = ends.map(|event| {
            let status = event["payload"]["status"].as_str().map(|status| format!(" {status}"));
            format!("{}{}", event["type"].as_str().unwrap(), status.unwrap_or_default())
        });
        words.collect()
    }

    fn cli(&self, verb: &str) -> String {
        let mut command = Program::command(self.options.dir.path());
        command.args(["session", verb, &self.session_id]).env("DATABASE_URL", &self.database.url);
        let output = command.env("WAKEFUL_LOG", "error").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

#[tokio::test]
async fn k12_a_kill_before_the_send_sends_once_and_asks_the_model_nothing_again() {
    // A guarded channel cannot tell whether an interrupted send succeeded. So here the process dies before it
    // claims the delivery.
    for (behaviour, failpoint) in [("guarded", "K12_claim=1*return"), ("idempotent", "K12=1*return")] {
        let mut office = Office::new(behaviour).await;
        office.dies(failpoint).await;
        let process = office.comes_back().await;
        assert_eq!(office.sent().len(), 1, "{behaviour}");
        assert_eq!(office.outbox().await, [("sent".to_owned(), None)]);
        assert_eq!(office.journal().await, ["GEN_SENT"]);
        // The kill may have cut off the model call for the reply, which follows the mail. It never cuts the
        // mail's own call.
        let asked = office.model.bodies();
        let for_mail = asked.iter().filter(|body| !body.contains("tool_call_id")).count();
        assert_eq!(for_mail, 1, "{asked:?}");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn k12_a_channel_that_can_be_asked_is_believed_only_when_no_attempt_can_be_under_way() {
    let mut office = Office::new("askable").await;
    office.dies("K12=1*return").await;
    let process = office.serve().await;
    eventually("the question to be put off", || async {
        let sql =
            "select count(*) from jobs where kind = 'deliver' and last_error like '%still be under way%'
            and $1 <> ''";
        let put_off: i64 = office.database.value(sql, "all").await;
        (put_off == 1).then_some(())
    })
    .await;
    assert!(office.sent().is_empty());
    let (status, error) = office.outbox().await.remove(0);
    assert_eq!(status, "sending", "it may have gone out");
    assert!(
        error.is_some_and(|error| error.contains("still be under way")),
        "the list says what it waits for"
    );
    sqlx::query(
        "update deliveries set sending_at = sending_at - interval '1 hour',
            settled_by = settled_by - interval '1 hour'",
    )
    .execute(&office.database.pool)
    .await
    .unwrap();
    office.is_done().await;
    assert_eq!(office.sent().len(), 1);
    assert_eq!(office.outbox().await[0].0, "sent");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn k13_a_kill_after_the_send_is_settled_as_the_channel_allows() {
    // (behaviour, attempts in the ledger, how the delivery ends, how the journal ends)
    let table = [
        ("idempotent", 2, "sent", "GEN_SENT"),
        ("askable", 1, "sent", "GEN_SENT"),
        ("guarded", 1, "uncertain", "DELIVERY_FAILED uncertain"),
    ];
    for (behaviour, attempts, status, journal) in table {
        let mut office = Office::new(behaviour).await;
        office.dies("K13=1*return").await;
        let process = office.comes_back().await;
        let sent = office.sent();
        assert_eq!(sent.len(), attempts, "{behaviour}: {sent:?}");
        assert!(sent.iter().all(|(key, _)| *key == sent[0].0), "one key, so its recipient has one: {sent:?}");
        assert_eq!(office.outbox().await[0].0, status, "{behaviour}");
        assert_eq!(office.journal().await, [journal], "{behaviour}");
        let why = office.cli("why");
        let surfaced = why.contains("It is not known whether a message by email was sent");
        assert_eq!(surfaced, status == "uncertain", "{why}");

        // The first delivery does not block a later message. It is not sent again.
        office.ask(&process.client(), "Second").await;
        process.client().wait_for(&office.session_id, "completed").await;
        office.is_done().await;
        assert_eq!(office.sent().len(), attempts + 1, "{behaviour}");
        assert_eq!(office.sent().last().unwrap().1, "Second");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn what_is_tried_again_on_an_operators_word_may_fail_and_holds_nothing_up() {
    let mut office = Office::new("guarded").await;
    office.dies("K13=1*return").await;
    let process = office.comes_back().await;
    assert_eq!(office.outbox().await[0].0, "uncertain");
    office.says("refused nobody of that name");
    sqlx::query("update deliveries set settled_by = clock_timestamp()")
        .execute(&office.database.pool)
        .await
        .unwrap();
    let delivery: String = office
        .database
        .value("select delivery_id from deliveries where session_id = $1", &office.session_id)
        .await;
    let path = format!("/v1/sessions/{}/resolve", office.session_id);
    let word = json!({"delivery_id": delivery, "outcome": "did_not_happen"});
    let (status, resolved) = process.client().post(&path, &word).await;
    assert_eq!((status.as_u16(), &resolved["status"]), (202, &json!("queued")), "{resolved}");
    office.is_done().await;
    assert_eq!(office.outbox().await[0].0, "failed");
    assert_eq!(office.journal().await, ["DELIVERY_FAILED uncertain", "DELIVERY_FAILED failed"]);

    office.says("");
    office.ask(&process.client(), "Second").await;
    process.client().wait_for(&office.session_id, "completed").await;
    office.is_done().await;
    assert_eq!(office.sent().last().unwrap().1, "Second");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn k14_a_kill_after_the_send_was_written_down_changes_nothing() {
    let mut office = Office::new("guarded").await;
    office.dies("K14=1*return").await;
    let before = dump(&office.database).await;
    let process = office.comes_back().await;
    assert_eq!(office.sent().len(), 1);
    assert_eq!(office.journal().await, ["GEN_SENT"]);
    assert_eq!(dump(&office.database).await["deliveries"], before["deliveries"]);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn k15_what_is_too_old_expires_and_is_never_sent_late() {
    let mut office = Office::new("guarded").await;
    office.says("later the post office is closed");
    let process = office.serve().await;
    office.ask(&process.client(), "First").await;
    process.client().wait_for(&office.session_id, "completed").await;
    eventually("the first attempt", || async { office.outbox().await[0].1.is_some().then_some(()) }).await;
    office.an_hour_later().await;
    office.says("");
    office.is_done().await;
    let outbox = office.outbox().await;
    assert_eq!(outbox[0].0, "expired");
    assert!(outbox[0].1.as_ref().unwrap().contains("not sent late"), "{outbox:?}");
    assert!(office.sent().is_empty());
    assert_eq!(office.journal().await, ["DELIVERY_FAILED expired"]);
    assert!(office.cli("show").contains("expired"), "{}", office.cli("show"));
    assert!(office.cli("why").contains("too late"), "{}", office.cli("why"));

    // A newer delivery is sent.
    office.ask(&process.client(), "Second").await;
    process.client().wait_for(&office.session_id, "completed").await;
    office.is_done().await;
    assert_eq!(office.sent().len(), 1);
    assert_eq!(office.sent()[0].1, "Second");
    assert!(process.terminate().success());
}

#[tokio::test]
async fn k15_what_was_being_sent_when_it_grew_too_old_is_asked_for_and_not_sent_again() {
    // (behaviour, where it died, attempts in the ledger, how the delivery ends)
    let table = [
        ("idempotent", "K12=1*return", 0, "uncertain"),
        ("askable", "K12=1*return", 0, "expired"),
        ("askable", "K13=1*return", 1, "sent"),
    ];
    for (behaviour, failpoint, attempts, status) in table {
        let mut office = Office::new(behaviour).await;
        office.dies(failpoint).await;
        office.an_hour_later().await;
        let process = office.comes_back().await;
        assert_eq!(office.outbox().await[0].0, status, "{behaviour} {failpoint}");
        assert_eq!(office.sent().len(), attempts, "{behaviour} {failpoint}");
        assert_eq!(office.journal().await.len(), 1);
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn what_cannot_be_sent_is_tried_by_the_clock_and_then_fails() {
    let mut office = Office::new("guarded").await;
    office.says("later the post office is closed");
    let process = office.serve().await;
    office.ask(&process.client(), "First").await;
    let tried = async |since: i64| {
        eventually("an attempt", || async {
            let sql = "select count(*) from deliveries where status = 'queued' and last_error is not null
                and attempt > $1::bigint";
            (office.database.value::<i64>(sql, &since.to_string()).await == 1).then_some(())
        })
        .await;
    };
    tried(0).await;
    // A high number of attempts changes nothing: only the time counts.
    office.run_sql("update deliveries set attempt = 1000").await;
    office.run_sql("update jobs set run_at = clock_timestamp() where lease is null").await;
    tried(1000).await;
    // Time without a worker does not count, because nothing was tried.
    let away = "update deliveries set tried_since = tried_since - interval '9 hours', tried_at = tried_at - interval '6 hours'";
    office.run_sql(away).await;
    office.run_sql("update jobs set run_at = clock_timestamp() where lease is null").await;
    tried(1001).await;
    office.run_sql("update deliveries set tried_since = tried_since - interval '6 hours'").await;
    office.run_sql("update jobs set run_at = clock_timestamp() where lease is null").await;
    office.is_done().await;
    let (status, error) = office.outbox().await.remove(0);
    assert_eq!(
        (status.as_str(), error.as_deref()),
        ("failed", Some("the post office is closed (it was tried for 5 hours)"))
    );
    assert_eq!(office.journal().await, ["DELIVERY_FAILED failed"]);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn k36_what_kills_whoever_sends_it_is_tried_a_few_times_and_no_more() {
    // (behaviour, how it ends)
    for (behaviour, status) in [("idempotent", "uncertain"), ("askable", "failed")] {
        let mut office = Office::new(behaviour).await;
        office.dies("K12=1*return").await;
        // Raise the counters, so that the death above is the job's fifth.
        office.run_sql("update jobs set died = 4, stuck = 5 where kind = 'deliver'").await;
        office
            .run_sql(
                "update deliveries set sending_at = sending_at - interval '1 hour',
            settled_by = settled_by - interval '1 hour'",
            )
            .await;
        let process = office.comes_back().await;
        let (ended, error) = office.outbox().await.remove(0);
        assert_eq!(ended, status, "{behaviour}: {error:?}");
        assert!(error.as_deref().unwrap().contains("5 workers died while they were sending it"), "{error:?}");
        assert!(office.sent().is_empty(), "{behaviour}");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn k16_two_unsent_replies_and_a_crash_are_both_delivered_in_order() {
    let mut office = Office::new("guarded").await;
    // Postgres accepts no NUL in a text. The job must be released all the same.
    office.says("later bro\0ken pipe");
    let process = office.serve().await;
    let client = process.client();
    office.ask(&client, "First").await;
    client.wait_for(&office.session_id, "completed").await;
    eventually("the job to be given back", || async {
        let sql = "select count(*) from jobs where kind = 'deliver' and last_error = $1";
        let given_back: i64 = office.database.value(sql, "bro\u{fffd}ken pipe").await;
        (given_back == 1).then_some(())
    })
    .await;

    // A delivery that waits blocks no step, and the next one does not overtake it.
    office.ask(&client, "Second").await;
    client.wait_for(&office.session_id, "completed").await;
    assert!(office.sent().is_empty());
    process.kill();
    office.says("");
    let process = office.comes_back().await;
    let subjects: Vec<String> = office.sent().into_iter().map(|(_, subject)| subject).collect();
    assert_eq!(subjects, ["First", "Second"]);
    assert_eq!(office.outbox().await.iter().filter(|(status, _)| status == "sent").count(), 2);
    assert_eq!(office.journal().await, ["GEN_SENT", "GEN_SENT"]);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn every_end_of_a_delivery_is_in_the_journal_with_its_reason() {
    let mut office = Office::new("guarded").await;
    let process = office.serve().await;
    let client = process.client();
    let long = "x".repeat(100_000);
    for (answer, text) in [
        ("refused no such address", "Refused"),
        ("unknown the line went dead", "Unknown"),
        (&format!("receipt {long}"), "Large"),
        ("receipt with a \0 in it", "Nul"),
        ("", "Plain"),
    ] {
        office.says(answer);
        office.ask(&client, text).await;
        client.wait_for(&office.session_id, "completed").await;
        office.is_done().await;
    }
    let statuses: Vec<String> = office.outbox().await.into_iter().map(|(status, _)| status).collect();
    assert_eq!(statuses, ["failed", "uncertain", "sent", "sent", "sent"]);
    let expected =
        ["DELIVERY_FAILED failed", "DELIVERY_FAILED uncertain", "GEN_SENT", "GEN_SENT", "GEN_SENT"];
    assert_eq!(office.journal().await, expected);
    let traces = Traces::of(&office.database, &office.session_id).await;
    let reasons: Vec<&Value> =
        traces.journal("DELIVERY_FAILED").into_iter().map(|payload| &payload["reason"]).collect();
    assert_eq!(reasons, ["no such address", "the line went dead"]);
    let longest: i32 = office
        .database
        .value("select max(length(receipt::text)) from deliveries where $1 <> ''", "all")
        .await;
    assert!(longest < 4096, "{longest}");
    let (_, shown) = client.get(&format!("/v1/sessions/{}", office.session_id)).await;
    assert_eq!(shown["status"], "completed");
    assert!(office.cli("show").contains("omitted_bytes"), "{}", office.cli("show"));
    assert!(process.terminate().success());
}

#[tokio::test]
async fn each_try_of_a_delivery_is_kept_with_its_begin_and_end() {
    let mut office = Office::new("idempotent").await;
    office.says("later the server is busy");
    let process = office.serve().await;
    let client = process.client();
    office.ask(&client, "First").await;
    let tries = async || {
        let (_, list) = client.get(&format!("/v1/deliveries?session_id={}", office.session_id)).await;
        list["items"][0].clone()
    };
    eventually("a second try", || async {
        let tries = tries().await["tries"].as_array().map(Vec::len);
        (tries >= Some(2)).then_some(())
    })
    .await;
    office.says("refused no such mailbox");
    eventually("the mail to be refused", || async { (tries().await["status"] == "failed").then_some(()) })
        .await;
    let refused = tries().await;
    let before = refused["tries"].as_array().unwrap().clone();
    assert_eq!(before.len() as i64, refused["attempt"].as_i64().unwrap(), "{refused}");
    office.says("");
    let delivery = refused["delivery_id"].as_str().unwrap();
    let (status, resent) = client.post(&format!("/v1/deliveries/{delivery}/resend"), &json!({})).await;
    assert!(status.is_success(), "{resent}");
    eventually("the mail to be sent", || async { (tries().await["status"] == "sent").then_some(()) }).await;
    let sent = tries().await;
    let all = sent["tries"].as_array().unwrap();
    assert_eq!(&all[..before.len()], before, "what was tried before it was sent again stays");
    assert_eq!(all.len(), before.len() + 1, "{sent}");
    let time = |one: &Value, key: &str| one[key].as_str().map(str::to_owned);
    for pair in all.windows(2) {
        assert!(time(&pair[0], "began") < time(&pair[0], "ended"), "{sent}");
        assert!(time(&pair[0], "ended") < time(&pair[1], "began"), "{sent}");
    }
    // Nobody knows when a try ended whose worker died in it.
    drop(process);
    office.dies("K12=1*return").await;
    office.comes_back().await;
    let lost = "select count(*) from deliveries where tries @> '[{\"ended\": null}]' and $1 <> ''";
    assert_eq!(office.database.value::<i64>(lost, "all").await, 1);
}

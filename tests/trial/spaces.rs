//! The matrix of spaces: every route and every command, with ids of its own space, of another one and of none, under each
//! scope. No answer may have a word or an id of another space, or differ from the answer for an id that does not exist; and the rows
//! of the other space stay as they are. The routes come from the table of rules and the commands from the help, so a new one
//! is in the matrix at once.

mod commands;

use super::is_whole;
use crate::support::messengers::{self, WEBHOOK_SECRET};
use crate::support::{Answer, Database, ModelServer, Options, Process};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use wakeful_http::access::{OpenTo, RULES, Rule};
use wakeful_store::Store;
use wakeful_store::token::NewToken;
use wakeful_workflow::access::Scope;

const TOKEN: &str = "the-configured-token-of-the-trial";

/// The space of the callers, and the one that they must learn nothing of.
const OWN: &str = "acme";
const OTHER: &str = "bolt";

/// Ids of one space by what they name.
#[derive(Debug)]
struct Names {
    session: String,
    delivery: String,
    /// Has no space in it, as the API takes it.
    conversation: String,
    schedule: String,
    trigger_type: String,
    /// Everything that tells this space: ids and words. Names of conversations and schedules are not among them, because
    /// each space may have one of the same name.
    marks: BTreeSet<String>,
}

impl Names {
    /// Ids that do not exist.
    fn none() -> Names {
        Names {
            session: "sess_0193e8d7c4e07c3fa1b2c3d400000000".to_owned(),
            delivery: "dlv_0193e8d7c4e07c3fa1b2c3d400000000".to_owned(),
            conversation: "c-none".to_owned(),
            schedule: "s-none".to_owned(),
            trigger_type: "of_none".to_owned(),
            marks: BTreeSet::new(),
        }
    }

    fn ids(&self) -> [&str; 5] {
        [&self.session, &self.delivery, &self.conversation, &self.schedule, &self.trigger_type]
    }

    /// The text with these names replaced, so that answers for different names can be compared.
    fn blank(&self, text: &str) -> String {
        self.ids().iter().fold(text.to_owned(), |text, id| text.replace(id, "*"))
    }
}

struct Stage {
    database: Database,
    options: Options,
    process: Process,
    http: reqwest::Client,
    own: Names,
    other: Names,
    _model: ModelServer,
}

impl Stage {
    async fn new() -> Stage {
        let database = Database::new().await;
        database.with_roles().await;
        let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
        let options = Options::new()
            .config("[agents.default]\nmodel = \"openai/test\"\nsystem_prompt = \"You are a trial.\"\n")
            .config(&[OWN, OTHER].map(triggers).concat())
            .config(&format!("[messenger.webhook]\nsecrets = [\"{WEBHOOK_SECRET}\"]\nspace = \"{OTHER}\""))
            .env("OPENAI_BASE_URL", &model.url)
            .env("WAKEFUL_TOKEN", TOKEN)
            .env("WAKEFUL_SERVER__INTERNAL_TOKENS", "an-internal-token-of-the-trial");
        let options =
            options.clone().env("WAKEFUL_EMAIL__MAILDIR", options.path("mail").display().to_string());
        let process = options.spawn(&database.as_role("wakeful_runtime"));
        process.wait_for_log("\"Listening\"").await;
        let url = process.url();
        messenger(&url).await;
        let (own, other) = tokio::join!(fill(&database, &url, OWN), fill(&database, &url, OTHER));
        Stage { own, other, database, options, process, http: reqwest::Client::new(), _model: model }
    }

    async fn token(&self, scope: Scope, space: Option<&str>) -> String {
        let store = Store::connect(&self.database.url, 2, "wakeful test").await.expect("the test's database");
        let new =
            NewToken { scope, space_id: space.map(str::to_owned), agent: None, name: None, expires_in: None };
        let (_, token) = store.create_token(&new).await.expect("a token");
        store.close().await;
        token
    }

    /// A digest of all rows of the other space, by table.
    async fn rows_of_the_other(&self) -> BTreeMap<String, Option<String>> {
        let tables: Vec<String> = sqlx::query_scalar(
            // A worker fills the index of the search meanwhile.
            "select relation.relname::text from pg_policy p join pg_class relation on relation.oid = p.polrelid
            where not starts_with(relation.relname, 'search_')",
        )
        .fetch_all(&self.database.pool)
        .await
        .expect("pg_policy");
        let mut digests = BTreeMap::new();
        for table in tables {
            let digest = format!(
                "select md5(string_agg(row::text, ',' order by row::text)) from {table} row where space_id = '{OTHER}'"
            );
            let digest = sqlx::query_scalar(AssertSqlSafe(digest)).fetch_one(&self.database.pool).await;
            digests.insert(table, digest.expect("a digest"));
        }
        digests
    }
}

async fn post(url: &str, space: &str, path: &str, body: &Value) -> Value {
    let request = reqwest::Client::new().post(format!("{url}{path}")).bearer_auth(TOKEN);
    let request = request.header("x-wakeful-space", space).body(body.to_string());
    let response = request.send().await.expect("the server answers");
    let status = response.status();
    let body: Value = response.json().await.expect("JSON");
    assert!(status.is_success(), "{path}: {status}: {body}");
    body
}

/// The mailbox and the schedule of a space in the configuration.
fn triggers(space: &str) -> String {
    format!(
        "[email.mailboxes.{space}]\naddress = \"{space}@example.org\"\nspace = \"{space}\"\n\
         [schedules.daily-of-{space}]\ncron = \"30 4 1 1 *\"\nprompt = \"word-of-{space}\"\nspace = \"{space}\"\n"
    )
}

/// A message of the messenger, whose space is the other one.
async fn messenger(url: &str) {
    let body =
        json!({"conversation_id": format!("w-of-{OTHER}"), "text": format!("word-of-{OTHER}")}).to_string();
    let (id, at) = (format!("msg-of-{OTHER}"), chrono::Utc::now().timestamp().to_string());
    let request = reqwest::Client::new()
        .post(format!("{url}/v1/triggers/messenger/webhook"))
        .header("webhook-id", &id)
        .header("webhook-signature", messengers::webhook_signature(WEBHOOK_SECRET, &id, &at, &body))
        .header("webhook-timestamp", at);
    let response = request.body(body).send().await.expect("the server answers");
    assert_eq!(response.status(), StatusCode::ACCEPTED);
}

/// A mail to the mailbox of the space.
async fn mail(url: &str, space: &str) {
    let mail = format!(
        "From: Ann <ann@example.com>\r\nTo: {space}@example.org\r\nSubject: subject-of-{space}\r\n\
         Message-ID: <id-of-{space}@example.com>\r\n\r\nword-of-{space}\r\n"
    );
    let request = reqwest::Client::new().post(format!("{url}/v1/triggers/email/raw")).bearer_auth(TOKEN);
    let response =
        request.header("content-type", "message/rfc822").body(mail).send().await.expect("an answer");
    assert_eq!(response.status(), StatusCode::ACCEPTED);
}

/// Makes rows of every kind in a space, and returns its names.
async fn fill(database: &Database, url: &str, space: &str) -> Names {
    let (conversation, schedule) = (format!("c-{space}"), format!("s-{space}"));
    let said = json!({"text": format!("word-of-{space}"), "client_key": format!("key-of-{space}")});
    let woken = post(url, space, &format!("/v1/chat/{conversation}/messages"), &said).await;
    let session = woken["session_id"].as_str().expect("an id").to_owned();
    crate::support::eventually("the run ends", || async {
        let status: String =
            database.value("select status from conversation_sessions where session_id = $1", &session).await;
        (status == "completed").then_some(())
    })
    .await;
    // It fires on no day of the trial, in all likelihood.
    let prompt = json!({"name": schedule, "cron": "30 4 1 1 *", "prompt": format!("word-of-{space}")});
    post(url, space, "/v1/schedules", &prompt).await;
    let path = format!("/v1/sessions/{session}/fork");
    post(url, space, &path, &json!({"at": "last-user", "text": format!("word-of-{space}, forked")})).await;
    mail(url, space).await;
    crate::support::eventually("the space rests", || async {
        let jobs: i64 = database.value("select count(*) from jobs where space_id = $1", space).await;
        (jobs == 0).then_some(())
    })
    .await;
    let delivery = format!("dlv_{space}");
    let rows = format!(
        "insert into deliveries
            (delivery_id, space_id, conversation_id, channel, ordinal, session_id, source_key, content, status)
        values ('{delivery}', '{space}', '{space}/{conversation}', 'email', 1, '{session}', 'call_{space}',
            '{{\"text\": \"word-of-{space}\"}}', 'failed');
        insert into tool_calls
            (space_id, session_id, call_id, run_id, step_number, message_number, name, args_sha256, effect, status)
        values ('{space}', '{session}', 'call_{space}', 'run_{space}', 1, 2, 'charge', '', 'guarded', 'uncertain');
        insert into mails (space_id, mailbox_id, message_id, subject, subject_key, body_sha256, answers, dropped)
        values ('{space}', 'm', 'mail-of-{space}', 'word-of-{space}', '', '', '{{}}', 'word-of-{space}');
        insert into legal_holds (space_id, person, reason) values ('{space}', 'ann', 'word-of-{space}');
        insert into conversation_sessions (session_id, conversation_id, space_id, mailbox_id, trigger_type, trigger_id, agent,
            model_id, model_context_window, status)
        values ('sess_{space}', '{space}/c-own-{space}', '{space}', 'm', 'of_{space}', 'x', 'default', 'm', 1, 'completed')"
    );
    sqlx::raw_sql(AssertSqlSafe(rows)).execute(&database.pool).await.expect("the rows are made");
    let mut marks = BTreeSet::from([format!("-of-{space}"), format!("of_{space}"), format!("c-own-{space}")]);
    let tables: Vec<String> = sqlx::query_scalar("select polrelid::regclass::text from pg_policy")
        .fetch_all(&database.pool)
        .await
        .unwrap();
    for table in tables {
        let ids = format!(
            "select distinct id[1] from {table} row
            cross join lateral regexp_matches(row::text, '(?:sess|run|dlv|msg|gen|hold|sch)_[0-9a-z]+', 'g') as id
            where row.space_id = '{space}'"
        );
        let ids: Vec<String> =
            sqlx::query_scalar(AssertSqlSafe(ids)).fetch_all(&database.pool).await.unwrap();
        marks.extend(ids);
    }
    let trigger_type = format!("of_{space}");
    assert!(marks.len() > 12, "{marks:?}");
    Names { session, delivery, conversation, schedule, trigger_type, marks }
}

/// A request of the matrix: the path and query of a route with some names, and its body.
fn request(rule: &Rule, names: &Names, beside: &Names) -> Vec<(String, String)> {
    let mut path =
        rule.path.replace("{conversation_id}", &names.conversation).replace("{other}", &names.session);
    let id = match rule.path {
        path if path.contains("/deliveries/") => &names.delivery,
        path if path.contains("/schedules/") => &names.schedule,
        path if path.contains("/conversations/") => &names.conversation,
        // The left one is the caller's own.
        path if path.contains("/diff/") => &beside.session,
        _ => &names.session,
    };
    path = path.replace("{id}", id);
    let body = match rule.verb {
        Some("chat.message" | "session.send") => json!({"text": "Hi", "client_key": "key-of-bolt"}),
        Some("session.fork") => json!({"at": "last-user"}),
        Some("session.resolve") => {
            json!({"call_id": format!("call_{OTHER}"), "outcome": "happened", "result": "x", "by": "x"})
        }
        Some("session.approve" | "session.decline") => json!({"call_id": format!("call_{OTHER}"), "by": "x"}),
        Some("schedule.create" | "schedule.edit") => {
            json!({"name": names.schedule, "cron": "30 4 1 1 *", "prompt": "p", "conversation_id": names.conversation})
        }
        Some("herald.accept") => {
            json!({"notice": {"title": "t", "body": "b"}, "conversation_id": names.conversation})
        }
        Some("token.user") => json!({"user_id": "ann"}),
        Some("token.create") => json!({"scope": "read"}),
        Some("session.import") => json!("no bundle"),
        _ => json!({}),
    };
    let mut requests = vec![(path.clone(), body.to_string())];
    if rule.method == "GET" && !rule.path.contains('{') {
        // Lists: each filter and each place to begin at.
        for query in [
            format!("conversation_id={}", names.conversation),
            format!("session_id={}", names.session),
            format!("trigger_type={}", names.trigger_type),
            format!("space={}", names.conversation.trim_start_matches("c-")),
            format!("cursor={}", names.session),
            format!("cursor={}", names.delivery),
            "all=true&limit=500".to_owned(),
        ] {
            requests.push((format!("{path}?{query}"), String::new()));
        }
    }
    requests
}

/// Who asks.
struct Asks {
    what: String,
    token: String,
    /// What the header `X-Wakeful-Space` names.
    names: Option<&'static str>,
    sees: Option<&'static str>,
    /// The token is of the installation.
    everywhere: bool,
}

async fn send(
    stage: &Stage,
    asks: &Asks,
    rule: &Rule,
    (path, body): &(String, String),
) -> (StatusCode, String) {
    let method: Method = rule.method.parse().expect("a method");
    let url = format!("{}{path}", stage.process.url());
    let mut request =
        stage.http.request(method, url).bearer_auth(&asks.token).timeout(Duration::from_secs(20));
    if let Some(space) = asks.names {
        request = request.header("x-wakeful-space", space);
    }
    if rule.method != "GET" {
        request = request.body(body.clone());
    }
    let response = request.send().await.expect("the server answers");
    let status = response.status();
    // A stream of a session that exists does not end.
    let is_stream = path.contains("/stream") && status.is_success();
    let text = if is_stream { String::new() } else { response.text().await.expect("a body") };
    (status, text)
}

/// The marks of other spaces in an answer, without those that the caller named.
fn foreign(stage: &Stage, asks: &Asks, asked: &(String, String), answer: &str) -> Vec<String> {
    let spaces = [(OWN, &stage.own), (OTHER, &stage.other)];
    let hidden = spaces.into_iter().filter(|(space, _)| asks.sees != Some(*space));
    let marks = hidden.flat_map(|(_, names)| names.marks.iter());
    let named = |mark: &&String| asked.0.contains(mark.as_str()) || asked.1.contains(mark.as_str());
    marks.filter(|mark| !named(mark) && answer.contains(mark.as_str())).cloned().collect()
}

#[tokio::test]
async fn no_route_tells_or_changes_anything_of_another_space() {
    let stage = Stage::new().await;
    let whole = std::env::var_os("WAKEFUL_TRIAL").is_some();
    let mut callers = Vec::new();
    for scope in [Scope::Read, Scope::Operate, Scope::Admin] {
        let what = |of: &str| format!("{} of {of}", scope.as_str());
        let own = stage.token(scope, Some(OWN)).await;
        callers.push(Asks { what: what(OWN), token: own, names: None, sees: Some(OWN), everywhere: false });
        let every = stage.token(scope, None).await;
        callers.push(Asks {
            what: what("all, in acme"),
            token: every.clone(),
            names: Some(OWN),
            sees: Some(OWN),
            everywhere: true,
        });
        // Without the header such a token works in the space `default`, where nothing is.
        callers.push(Asks {
            what: what("all, in default"),
            token: every,
            names: None,
            sees: None,
            everywhere: true,
        });
    }
    let user = post(&stage.process.url(), OWN, "/v1/user-tokens", &json!({"user_id": "ann"})).await;
    let user = user["token"].as_str().expect("a token").to_owned();
    callers.push(Asks {
        what: "a user of acme".to_owned(),
        token: user,
        names: None,
        sees: Some(OWN),
        everywhere: false,
    });
    if !whole {
        callers.retain(|asks| ["operate of acme", "admin of all, in acme"].contains(&asks.what.as_str()));
    }
    let before = stage.rows_of_the_other().await;
    let (none, mut asked, mut found) = (Names::none(), 0, Vec::new());
    for asks in &callers {
        for rule in RULES {
            let of = |names| request(rule, names, if asks.sees.is_some() { &stage.own } else { &none });
            for ((own, other), none_of) in of(&stage.own).iter().zip(of(&stage.other)).zip(of(&none)) {
                let what = |(path, _): &(String, String)| format!("{}: {} {path}", asks.what, rule.method);
                let of_none = send(&stage, asks, rule, &none_of).await;
                let of_other = send(&stage, asks, rule, &other).await;
                let of_own = send(&stage, asks, rule, own).await;
                asked += 3;
                for (request, (status, answer)) in [(&none_of, &of_none), (&other, &of_other), (own, &of_own)]
                {
                    if status.is_server_error() {
                        found.push(format!("{}: {status}: {answer}", what(request)));
                    }
                    // The audit and the tokens are the installation's, and so is its admin.
                    // And it may name the space that it asks about.
                    let names_it = request.0.contains("?space=") || request.0.contains("&space=");
                    let is_public = asks.everywhere && (rule.open_to == OpenTo::Installation || names_it);
                    let foreign = foreign(&stage, asks, request, answer);
                    if !foreign.is_empty() && !is_public {
                        found.push(format!("{}: {status} shows {foreign:?}: {answer}", what(request)));
                    }
                }
                let blank = |names: &Names, (status, text): &(StatusCode, String)| {
                    // A success makes ids of its own; what it shows is compared above. A refusal may name the unknown one of
                    // two ids.
                    (
                        *status,
                        if status.is_success() { String::new() } else { none.blank(&names.blank(text)) },
                    )
                };
                let (same, unknown) = (blank(&stage.other, &of_other), blank(&none, &of_none));
                if same != unknown {
                    found.push(format!(
                        "{}: an id of another space is not as unknown as any: {same:?} {unknown:?}",
                        what(&other)
                    ));
                }
            }
        }
    }
    assert!(found.is_empty(), "{} of {asked} answers: {found:#?}", found.len());
    assert!(asked > if whole { 2000 } else { 300 }, "{asked}");
    assert_eq!(stage.rows_of_the_other().await, before, "the rows of the other space are as they were");
    exports(&stage).await;
    is_whole(&stage.process);
    println!("{asked} requests of {} callers to {} routes", callers.len(), RULES.len());
}

/// Exports have a token of their own, and name the space.
async fn exports(stage: &Stage) {
    for (space, status) in [(OWN, StatusCode::NOT_FOUND), (OTHER, StatusCode::OK)] {
        let url = format!("{}/v1/sessions/{}/export", stage.process.url(), stage.other.session);
        let request =
            reqwest::Client::new().get(url).header("x-internal-token", "an-internal-token-of-the-trial");
        let response = request.header("x-wakeful-space", space).send().await.expect("the server answers");
        assert_eq!(response.status(), status, "in {space}");
        let bundle = response.text().await.expect("the whole bundle");
        assert_eq!(bundle.contains("word-of-bolt"), status == StatusCode::OK, "in {space}: {bundle}");
    }
}

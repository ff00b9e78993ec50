//! The pictures of the documentation, of a shop whose day had troubles: `make pictures`.
//!
//! `WAKEFUL_PICTURES=FOLDER` keeps them there. Without it they are drawn, looked at for what is too wide or broken, and dropped.

use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, Process, eventually};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::process::Command;
use wakeful_store::notify::link::{Act, Way};

const CONFIG: &str = r#"on_uncertain = "needs_attention"
[agents.till]
system_prompt = "You take payments."
model = "openai/gpt-5"
tools = ["charge"]
approve = ["charge"]
[models."openai/gpt-5"]
context_window = 128000
input_usd = 3.0
cached_usd = 0.3
output_usd = 15.0
[schedules.digest]
cron = "0 9 * * 1-5"
prompt = "What came in since yesterday?"
[schedules.inventory]
cron = "0 6 1 * *"
prompt = "Count the stock."
[[notify]]
name = "ops"
to = "email"
address = "ops@example.org"
window_s = 0.2
"#;

/// What was said in a shop, and what became of it.
struct Shop {
    database: Database,
    options: Options,
    model: ModelServer,
    is_mended: Arc<AtomicBool>,
}

fn reply(body: &Value, is_mended: bool) -> Answer {
    let messages = body["messages"].as_array().expect("messages");
    let users = messages.iter().rev().filter(|message| message["role"] == "user");
    let mut said = users.filter_map(|message| message["content"].as_str());
    let said = said.find(|text| !text.starts_with("[A note of the system")).unwrap_or_default();
    let mail = |to: &str, subject: &str, body: &str| json!({"to": [to], "subject": subject, "body": body});
    match (turns_since_user(body), said) {
        (_, said) if said.contains("scan") && !is_mended => Answer::Refused(
            400,
            "Invalid image: attachment 2 (scan.tiff) is not a supported media type".to_owned(),
        ),
        (_, said) if said.contains("catalogue") && !is_mended => {
            Answer::Refused(400, "This model's maximum context length is 128000 tokens".to_owned())
        }
        (0, said) if said.contains("table") => Answer::call("current_time", json!({})),
        (1, said) if said.contains("table") => {
            Answer::call("reserve", json!({"persons": if said.contains("six") { 6 } else { 4 }}))
        }
        (2, said) if said.contains("table") => Answer::call(
            "compose_email",
            mail(
                "ann@example.org",
                "Your table on Friday",
                "Dear Ann,\n\nyour table is reserved.\n\nThe Lamp",
            ),
        ),
        (_, said) if said.contains("table") => {
            Answer::text("Your table is reserved for Friday at eight. I have written to ann@example.org.")
        }
        (0, said) if said.contains("charge") => Answer::call("charge", json!({"cents": 1250})),
        (_, said) if said.contains("charge") => Answer::text("The order is paid."),
        (0, said) if said.contains("cards") => Answer::call(
            "ask_user",
            json!({"question": "Which colour shall the menu cards have: sand or slate?"}),
        ),
        (0, said) if said.contains("supplier") => Answer::call(
            "compose_email",
            mail("orders@example.net", "Ten crates of lemons", "Please deliver ten crates on Monday."),
        ),
        (_, said) if said.contains("supplier") => Answer::text("The order is on its way to the supplier."),
        _ => Answer::text("We are open from nine to eleven at night, every day but Monday."),
    }
}

impl Shop {
    async fn new() -> Shop {
        let is_mended = Arc::new(AtomicBool::new(false));
        let mended = Arc::clone(&is_mended);
        let model = ModelServer::start(move |body, _| reply(body, mended.load(Ordering::SeqCst))).await;
        model.pace(Duration::from_millis(90));
        let options = Options::new()
            .model("openai/gpt-5")
            .config(CONFIG)
            .env("OPENAI_BASE_URL", &model.url)
            .env("FIXTURE_POST", "guarded")
            .env("FIXTURE_TAKE_MS", "60");
        let path = |name: &str| options.path(name).display().to_string();
        let (sent, says) = (path("sent"), path("says"));
        let options = options.env("FIXTURE_SENT", sent).env("FIXTURE_POST_SAYS", says);
        Shop { database: Database::new().await, options, model, is_mended }
    }

    async fn serve(&self) -> Process {
        self.options.serve(&self.database).await
    }

    /// The mail server's answer from now on.
    fn post_says(&self, answer: &str) {
        std::fs::write(self.options.path("says"), answer).expect("the file");
    }

    async fn run_sql(&self, sql: &'static str) {
        sqlx::query(sql).execute(&self.database.pool).await.expect(sql);
    }

    async fn count(&self, sql: &'static str) -> i64 {
        self.database.value(sql, "all").await
    }

    /// A worker dies while the model speaks, and another one goes on. Returns the session.
    async fn a_table(&self) -> String {
        self.model.hold_from(2);
        let process = self.serve().await;
        let session =
            say(&process.client(), "table-friday", "A table for four on Friday at eight, please.").await;
        self.model.asked(3).await;
        process.kill();
        self.model.release();
        let process = self.serve().await;
        process.client().wait_for(&session, "completed").await;
        assert!(process.terminate().success());
        session
    }

    /// A worker dies while it charges three cards.
    async fn charges(&self) -> Vec<String> {
        std::fs::write(self.options.path("hold-charge"), "").expect("the file");
        let begun = self.options.effects().len() + 3;
        let process = self.serve().await;
        let mut sessions = Vec::new();
        for order in ["order-4698", "order-4702", "order-4705"] {
            sessions.push(say(&process.client(), order, "Please charge the card on file.").await);
        }
        self.options.has_effects(begun).await;
        process.kill();
        std::fs::remove_file(self.options.path("hold-charge")).expect("the file");
        sessions
    }

    /// Lets the day have been a long one: what visitors said lies some hours back, runs failed before, and the queue was read
    /// each minute.
    async fn a_long_day(&self) {
        for statement in LONG_DAY {
            self.run_sql(statement).await;
        }
    }
}

const LONG_DAY: [&str; 6] = [
    "update session_runs set created_at = created_at - make_interval(mins => abs(hashtext(session_id)) % 1380),
        started_at = started_at - make_interval(mins => abs(hashtext(session_id)) % 1380),
        completed_at = completed_at - make_interval(mins => abs(hashtext(session_id)) % 1380)
    where conversation_id like '%/visitor-%'",
    "update session_steps set started_at = started_at - make_interval(mins => abs(hashtext(session_id)) % 1380),
        committed_at = committed_at - make_interval(mins => abs(hashtext(session_id)) % 1380)
    where session_id in (select session_id from conversation_sessions where conversation_id like '%/visitor-%')",
    "update conversation_sessions
    set started_at = started_at - make_interval(mins => abs(hashtext(session_id)) % 1380),
        completed_at = completed_at - make_interval(mins => abs(hashtext(session_id)) % 1380)
    where conversation_id like '%/visitor-%'",
    "insert into error_hours (space_id, fingerprint, hour, count)
    select space_id, fingerprint, date_bin('1 hour', now(), timestamptz 'epoch') - make_interval(hours => ago),
        1 + abs(hashtext(fingerprint || ago)) % 5
    from error_groups, generate_series(1, 160) ago
    where abs(hashtext(ago || fingerprint)) % 4 = 0",
    "update error_groups g
    set first_at = past.first_at, count = g.count + past.count
    from (
        select fingerprint, min(hour) as first_at, sum(count) as count from error_hours
        where hour < now() - interval '1 hour'
        group by fingerprint
    ) past
    where past.fingerprint = g.fingerprint",
    "insert into queue_samples (at, ready, leased, delayed, oldest_ready_s)
    select date_trunc('minute', now()) - make_interval(mins => ago),
        greatest(0, 9 * sin(ago / 150.0) + 4 * sin(ago / 17.0))::bigint, (3 + 2 * sin(ago / 60.0))::bigint,
        (1 + sin(ago / 40.0))::bigint, greatest(0, 2 * sin(ago / 150.0) + sin(ago / 17.0))
    from generate_series(1, 1439) ago
    on conflict (at) do nothing",
];

/// Sends a message and returns its session.
async fn say(client: &Client, conversation: &str, text: &str) -> String {
    let answer = client.chat(conversation, text).await;
    answer["session_id"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

async fn said(client: &Client, conversation: &str, text: &str, status: &str) -> String {
    let session = say(client, conversation, text).await;
    client.wait_for(&session, status).await;
    session
}

async fn first(client: &Client, path: &str, key: &str) -> String {
    eventually(path, || async {
        let (_, list) = client.get(path).await;
        list["items"][0][key].as_str().map(str::to_owned)
    })
    .await
}

/// A mail comes in.
async fn mail(client: &Client, from: &str, subject: &str, more: &str) {
    let id = subject.to_lowercase().replace(' ', "-");
    let text = format!(
        "From: {from}\r\nTo: wakeful@localhost\r\nSubject: {subject}\r\nMessage-ID: <{id}@example.com>\r\n{more}\r\nHello,\r\n\r\nis there a table by the window?\r\n"
    );
    let request = client.post_request("/v1/triggers/email/raw").header("content-type", "message/rfc822");
    assert!(request.body(text).send().await.expect("an answer").status().is_success());
}

/// Everything that happens in the shop. Returns the process that serves it, and the pages by their names.
async fn a_day(shop: &Shop) -> (Process, Vec<(&'static str, String)>) {
    let table = shop.a_table().await;
    shop.model.pace(Duration::from_millis(5));
    let charges = shop.charges().await;
    let process = shop.serve().await;
    let client = process.client();
    for session in &charges {
        client.wait_for(session, "needs_attention").await;
    }
    for visitor in 0..60 {
        say(&client, &format!("visitor-{visitor}"), "When are you open?").await;
    }
    let order = json!({"text": "Please charge the card on file.", "agent": "till"});
    let (_, order) = client.post("/v1/chat/order-4711/messages", &order).await;
    let order = order["session_id"].as_str().expect("an id").to_owned();
    client.wait_for(&order, "needs_attention").await;
    said(&client, "menu-cards", "Please have new cards printed.", "waiting_input").await;
    let mut failed = Vec::new();
    for n in 0..4 {
        let scan = "What does the scan say?";
        failed.push(said(&client, &format!("inbox-{}", 4711 + n), scan, "failed").await);
    }
    said(&client, "catalogue", "Sum up the whole catalogue.", "failed").await;
    // Mail goes out, after some tries or not at all, and comes in.
    shop.post_says("later 450 4.2.0 greylisted, try again later");
    let lemons = said(&client, "lemons", "Write to the supplier.", "completed").await;
    let tried = "select count(*) from deliveries where jsonb_array_length(tries) >= 3 and $1 <> ''";
    eventually("three tries", || async { (shop.count(tried).await > 0).then_some(()) }).await;
    shop.post_says("");
    let is_sent = "select count(*) from deliveries where status = 'sent' and session_id = $1";
    eventually("the letter to go", || async {
        let sent: i64 = shop.database.value(is_sent, &lemons).await;
        (sent > 0).then_some(())
    })
    .await;
    shop.post_says("refused 550 5.1.1 no such mailbox");
    said(&client, "lemons-again", "Write to the supplier.", "completed").await;
    let refused = "select count(*) from deliveries where status = 'failed' and $1 <> ''";
    eventually("the letter to be refused", || async { (shop.count(refused).await > 0).then_some(()) }).await;
    shop.post_says("");
    mail(&client, "Ann <ann@example.org>", "A table by the window", "").await;
    mail(&client, "Bob <bob@example.com>", "Out of the office", "Auto-Submitted: auto-replied\r\n").await;
    // People act.
    let schedule = first(&client, "/v1/schedules", "schedule_id").await;
    client.post(&format!("/v1/schedules/{schedule}/trigger"), &json!({})).await;
    shop.is_mended.store(true, Ordering::SeqCst);
    let fork = json!({"at": 2, "text": "A table for six on Friday at eight, please.", "tool_mode": "dry"});
    let (_, forked) = client.post(&format!("/v1/sessions/{table}/fork"), &fork).await;
    let fork = forked["session_id"].as_str().unwrap_or_else(|| panic!("{forked}")).to_owned();
    client.wait_for(&fork, "completed").await;
    let body = json!({"verb": "retry", "session_ids": failed, "reason": "scans are converted now", "prove": 2, "canary": [1]});
    let (_, batch) = client.post("/v1/batches", &body).await;
    let batch = batch["batch_id"].as_str().unwrap_or_else(|| panic!("{batch}")).to_owned();
    eventually("the proof", || async {
        let (_, batch) = client.get(&format!("/v1/batches/{batch}")).await;
        (batch["status"] == "paused").then_some(())
    })
    .await;
    let group = first(&client, "/v1/errors?text=media", "fingerprint").await;
    let note = json!({"note": "ticket 311: the scanner sends TIFF since Monday"});
    client.post(&format!("/v1/errors/{group}/note"), &note).await;
    let pause =
        json!({"kind": "tool", "name": "compose_email", "reason": "the mail server moves", "for_s": 5400});
    client.post("/v1/pauses", &pause).await;
    shop.a_long_day().await;
    let told = first(&client, "/v1/notifications", "notification_id").await;
    let store = shop.database.store().await;
    let lasts = Duration::from_secs(3600);
    let link = store.mint_link(&told, &failed[3], Act::Retry, Way::Link, lasts).await;
    let link = link.expect("the database").expect("it is possible").token;
    let delivery = first(&client, &format!("/v1/deliveries?session_id={lemons}"), "delivery_id").await;
    let pages = vec![
        ("overview", "/".to_owned()),
        ("chat", "/chat/table-friday".to_owned()),
        ("sessions", "/sessions".to_owned()),
        ("session", format!("/sessions/{table}")),
        ("approval", format!("/sessions/{order}")),
        ("timeline", format!("/sessions/{table}?tab=timeline")),
        ("effects", format!("/sessions/{table}?tab=effects")),
        ("context", format!("/sessions/{table}?tab=context")),
        ("forks", format!("/sessions/{table}?tab=forks")),
        ("journal", format!("/sessions/{table}?tab=journal")),
        ("fork", format!("/sessions/{table}/fork?at=2")),
        ("compare", format!("/compare?left={table}&right={fork}")),
        ("errors", "/errors".to_owned()),
        ("error", format!("/errors/{group}")),
        ("uncertain", "/effects?ticked=all".to_owned()),
        ("batches", "/batches".to_owned()),
        ("batch", format!("/batches/{batch}")),
        ("deliveries", "/deliveries".to_owned()),
        ("delivery", format!("/deliveries/{delivery}")),
        ("notifications", "/notifications".to_owned()),
        ("notification", format!("/notifications/{told}")),
        ("schedules", "/schedules".to_owned()),
        ("schedule", format!("/schedules/{schedule}")),
        ("mails", "/mails".to_owned()),
        ("queue", "/queue".to_owned()),
        ("audit", "/audit".to_owned()),
        ("link", format!("/act/{link}")),
    ];
    (process, pages)
}

#[tokio::test]
#[ignore = "needs node and Chromium: make test-peers, make pictures"]
async fn every_page_fits_in_both_themes_and_on_a_narrow_screen() {
    let shop = Shop::new().await;
    let (process, pages) = a_day(&shop).await;
    let path = |name: &str| pages.iter().find(|(known, _)| *known == name).expect("a page").1.clone();
    let sheets: Vec<Value> = pages.iter().map(|(name, path)| json!({"name": name, "path": path})).collect();
    let single = |name: &str, theme: &str, width: u32, height: u32| json!({"name": name, "path": path(name), "theme": theme, "size": {"width": width, "height": height}});
    let singles = [
        single("overview", "light", 1120, 880),
        single("timeline", "dark", 1120, 690),
        single("approval", "light", 1120, 600),
        single("uncertain", "light", 1120, 850),
        single("link", "light", 700, 520),
    ];
    let kept = std::env::var_os("WAKEFUL_PICTURES").map(PathBuf::from);
    let folder: &Path = kept.as_deref().unwrap_or(shop.options.dir.path());
    let sheets_to = folder.join("console");
    std::fs::create_dir_all(&sheets_to).expect("the folder");
    let given = json!({"sheets": sheets, "singles": singles, "sheetsTo": sheets_to, "singlesTo": folder});
    let output = Command::new("node")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/peers/pictures.mjs"))
        .args([process.url(), given.to_string()])
        .env("WAKEFUL_PEERS", std::env::var("WAKEFUL_PEERS").expect("make sets it"))
        .kill_on_drop(true)
        .output()
        .await
        .expect("node runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let told: Value = serde_json::from_slice(&output.stdout).expect("the script prints JSON");
    assert_eq!(told["wide"], json!([]));
    assert_eq!(told["broken"], json!([]));
    assert_eq!(told["drawn"].as_array().map(Vec::len), Some(sheets.len() + singles.len()), "{told}");
}

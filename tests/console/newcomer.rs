//! What a person needs who sees the console for the first time. Nothing here runs a session: the server only accepts.

use super::*;
use crate::support::http;

/// A server without workers: what is sent stays queued.
async fn accepting(model: &str) -> (Database, Process) {
    let database = Database::new().await;
    let process =
        Options::new().model(model).arg("--roles=api").env("OPENAI_API_KEY", "k").spawn(&database.url);
    process.wait_for_log("\"Listening\"").await;
    (database, process)
}

/// Whether these stand in this order.
fn in_order(html: &str, parts: &[&str]) -> bool {
    let places: Vec<_> = parts.iter().map(|part| html.find(part)).collect();
    places.iter().all(Option::is_some) && places.is_sorted()
}

#[tokio::test]
async fn the_offline_model_says_that_it_is_one_and_offers_what_it_answers() {
    let (_database, process) = accepting("scripted/demo").await;
    let browser = Browser::new(&process.url());
    let page = browser.open("/chat").await;
    assert!(page.html.contains("has the offline model <code>scripted/demo</code>"), "{}", page.html);
    for text in ["What+time", "Write+a+note", "Help+me"] {
        page.link(&format!("?text={text}"));
    }
    let filled = browser.get(&page.link("?text=Help+me")).await;
    assert!(filled.html.contains("data-send>Help me choose</textarea>"), "{}", filled.html);
    let parts = [
        "<select name=\"agent\">",
        "<option value=\"\" selected>default</option>",
        "name=\"conversation\"",
        ">Begin</button>",
    ];
    assert!(in_order(&filled.html, &parts), "{}", filled.html);
    let (_database, process) = accepting("openai/test").await;
    let page = Browser::new(&process.url()).open("/chat").await;
    assert!(!page.html.contains("offline model") && !page.html.contains("?text="), "{}", page.html);
}

#[tokio::test]
async fn a_list_shows_what_was_first_said_and_a_session_at_work_is_looked_at_again() {
    let (_database, process) = accepting("openai/test").await;
    let client = process.client();
    let said = json!({"text": "A table\n for <two>, please."});
    let (_, woken) = client.post("/v1/chat/c1/messages", &said).await;
    let session = woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}"));
    client.post("/v1/chat/c1/messages", &json!({"text": "And one more thing."})).await;
    let (_, listed) = client.get("/v1/sessions").await;
    assert_eq!(listed["items"][0]["first_message"], "A table for <two>, please.", "{listed}");
    let browser = Browser::new(&process.url());
    for path in ["/sessions", "/chat", "/"] {
        let page = browser.open(path).await;
        assert!(page.html.contains("“A table for &#60;two&#62;, please.”"), "{path}: {}", page.html);
    }
    for path in [format!("/sessions/{session}"), "/chat/c1".to_owned()] {
        let page = browser.open(&path).await;
        let again = format!("<a href=\"/console{path}\" data-noscript-only>Look again</a>");
        assert!(page.html.contains(&again), "{path}: {}", page.html);
    }
    let other = http().get(format!("{}/v1/sessions", process.url())).header("x-wakeful-space", "acme");
    let other: Value = other.send().await.expect("an answer").json().await.expect("JSON");
    assert_eq!(other["items"], json!([]));
}

#[tokio::test]
async fn words_are_the_first_field_and_an_id_that_nobody_has_is_looked_for_in_what_was_said() {
    let (_database, process) = accepting("openai/test").await;
    let browser = Browser::new(&process.url());
    let page = browser.open("/sessions?conversation=table+for+two").await;
    assert!(
        in_order(&page.html, &["name=\"text\"", "name=\"conversation\"", "<details class=\"options\""]),
        "{}",
        page.html
    );
    let said = browser.get(&page.link("?text=table+for+two")).await;
    assert!(
        said.html.contains("value=\"table for two\"") && !said.html.contains("in what was said"),
        "{}",
        said.html
    );
    let (_, woken) = process.client().post("/v1/chat/c1/messages", &json!({"text": "Hello?"})).await;
    let client = process.client();
    let id = woken["session_id"].as_str().unwrap_or_else(|| panic!("{woken}"));
    client.post(&format!("/v1/sessions/{id}/cancel"), &json!({})).await;
    assert!(!browser.open(&format!("/sessions/{id}")).await.html.contains("<label>Reason <"));
}

#[tokio::test]
async fn a_dead_worker_is_gone_once_it_holds_nothing_and_silent_before() {
    let (database, process) = accepting("openai/test").await;
    let browser = Browser::new(&process.url());
    let died = "insert into workers (worker_id, host, pid, version, concurrency, beat_at)
        values ($1, 'host', 1, '0.1.0', 4, clock_timestamp() - interval '5 minutes')";
    sqlx::query(died).bind("w-dead").execute(&database.pool).await.expect("the row");
    let state = async || process.client().get("/v1/workers").await.1["items"][0]["state"].clone();
    assert_eq!(state().await, "gone");
    let page = browser.open("/queue").await;
    assert!(page.html.contains("last heard of 5 min") && !page.html.contains(">silent<"), "{}", page.html);
    assert!(!page.html.contains("up since") && !browser.open("/").await.html.contains(" silent</span>"));
    process.client().post("/v1/chat/c1/messages", &json!({"text": "Hello?"})).await;
    let held = "update jobs set lease = 1, worker_id = $1, run_at = clock_timestamp() + interval '1 hour'";
    sqlx::query(held).bind("w-dead").execute(&database.pool).await.expect("the job");
    assert_eq!(state().await, "silent");
    assert!(browser.open("/").await.html.contains("0</b><span>workers alive, 1 silent</span>"));
}

#[tokio::test]
async fn the_queues_history_begins_with_its_first_reading_and_says_what_was_read() {
    let (database, process) = accepting("openai/test").await;
    let read = "insert into queue_samples (at, ready, leased, delayed, oldest_ready_s)
        select date_trunc('hour', now()) - interval '1 hour' + make_interval(mins => m), m, 0, 0, 0
        from unnest(array[3, 4, 7]) m where $1 <> ''";
    sqlx::query(read).bind("all").execute(&database.pool).await.expect("the rows");
    let (_, queue) = process.client().get("/v1/queue").await;
    let minutes = |at: usize| {
        queue["history"][at]["at"].as_str().unwrap_or_else(|| panic!("{queue}"))[14..16].to_owned()
    };
    assert_eq!([minutes(0), minutes(1)], ["03", "07"], "{queue}");
    assert_eq!([&queue["history"][0]["ready"], &queue["history"][1]["ready"]], [4, 7], "{queue}");
    let browser = Browser::new(&process.url());
    for path in ["/", "/queue"] {
        let html = browser.open(path).await.html;
        assert!(
            html.contains("Jobs that waited or ran at a reading, one a minute; the highest is 7."),
            "{path}: {html}"
        );
    }
}

#[tokio::test]
async fn the_queue_page_and_queue_status_list_the_spaces_that_wait() {
    let (database, process) = accepting("openai/test").await;
    let waits = "insert into jobs (kind, space_id, conversation_id, session_id, step_number)
        select 'step', space, space || '/c' || n, 'sess_' || space || n, 1
        from (values ('bolt', 1), ('acme', 3)) s (space, jobs), generate_series(1, jobs) n
        where $1 <> ''";
    sqlx::query(waits).bind("all").execute(&database.pool).await.expect("the jobs");
    let (_, queue) = process.client().get("/v1/queue").await;
    let spaces = |of: &Value| {
        let of = of["spaces"].as_array().unwrap_or_else(|| panic!("{of}")).clone();
        of.iter().map(|one| (one["space_id"].clone(), one["ready"].clone())).collect::<Vec<_>>()
    };
    let expected = [(json!("acme"), json!(3)), (json!("bolt"), json!(1))];
    assert_eq!(spaces(&queue), expected, "{queue}");
    let page = Browser::new(&process.url()).open("/queue").await;
    assert!(
        page.html.contains("Spaces that wait") && in_order(&page.html, &["<td>acme</td>", "<td>bolt</td>"])
    );
    let options = Options::new().model("openai/test").env("OPENAI_API_KEY", "k");
    let status = crate::cli::run(&options, &database.url, &["queue", "status"]).await;
    assert!(
        status.out.contains("space\tacme\t3\t") && status.out.contains("space\tbolt\t1\t"),
        "{}",
        status.out
    );
    let status = crate::cli::run(&options, &database.url, &["queue", "status", "-o", "json"]).await.json();
    assert_eq!(spaces(&status), expected, "{status}");
    // Jobs that are claimed do not wait.
    let claimed =
        "update jobs set lease = 1, run_at = clock_timestamp() + interval '1 hour' where space_id = $1";
    sqlx::query(claimed).bind("bolt").execute(&database.pool).await.expect("the claim");
    let page = Browser::new(&process.url()).open("/queue").await;
    assert!(!page.html.contains("Spaces that wait"), "one space has nobody to share with");
}

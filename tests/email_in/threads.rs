//! Which mails continue a conversation, and which only claim to.

use super::{PROVED, conversation_of, mail, options, policy, post, says, sent, taken};
use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer};
use reqwest::{RequestBuilder, StatusCode};
use serde_json::{Value, json};

/// A mail that may have an envelope. It is unsigned, because no signature covers the envelope.
fn request(client: &Client, body: impl Into<Vec<u8>>) -> RequestBuilder {
    let request = client.post_request("/v1/triggers/email/raw");
    request.header("content-type", "message/rfc822").body(body.into())
}

/// The delivery id and the route of the session's reply.
async fn reply(database: &Database, session_id: &str) -> (String, Value) {
    let sql = "select delivery_id from deliveries where session_id = $1 and channel = 'email'";
    let id: String = database.value(sql, session_id).await;
    let sql = "select content -> 'to' from deliveries where session_id = $1 and channel = 'email'";
    (id, database.value(sql, session_id).await)
}

async fn first(client: &Client) -> String {
    let id =
        taken(client, mail("m1@example.com", "Lunch", "Cc: bob@example.com\r\n", "Shall we have lunch?"))
            .await;
    client.wait_for(&id, "completed").await;
    id
}

#[tokio::test]
async fn a_conversation_is_joined_by_proof_and_never_by_a_header_alone() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let session_id = first(&client).await;
    let conversation = conversation_of(&client, &session_id).await;
    let (delivery_id, route) = reply(&database, &session_id).await;
    let plus = route["reply_to"].as_str().unwrap().to_owned();
    let mut forged = plus.clone();
    forged.replace_range(12..13, if &plus[12..13] == "a" { "b" } else { "a" });

    let by_header = format!("In-Reply-To: <{delivery_id}@example.org>\r\n");
    let by_references = "References: <m1@example.com> <else@where>\r\n".to_owned();
    let eve = |id: &str, headers: &str| {
        mail(id, "Re: Lunch", headers, "Let me in.").replace("Ann <ann@example.com>", "eve@evil.org")
    };
    let proved_eve = "Authentication-Results: mx.example.org; dmarc=pass header.from=evil.org\r\n";
    let below =
        format!("Authentication-Results: mx.example.org; dmarc=none header.from=example.com\r\n{PROVED}");
    for (at, (what, body, rcpt, joins)) in [
        ("proved and named", mail("a@x", "Re: Lunch", &format!("{PROVED}{by_header}"), "One."), None, true),
        (
            "proved and named by references",
            mail("b@x", "Re: Lunch", &format!("{PROVED}{by_references}"), "Two."),
            None,
            true,
        ),
        ("a signed address", eve("c@x", ""), Some(&plus), true),
        ("a header alone", mail("d@x", "Re: Lunch", &by_header, "Three."), None, false),
        ("proved, naming nothing", mail("e@x", "Re: Lunch", PROVED, "Four."), None, false),
        (
            "a proved stranger",
            eve("f@x", &format!("{proved_eve}{by_header}")).replace("eve@", "mallory@"),
            None,
            false,
        ),
        ("proof of another", eve("g@x", &format!("{PROVED}{by_header}")), None, false),
        (
            "proof below a result that is none",
            mail("h@x", "Re: Lunch", &format!("{below}{by_header}"), "Five."),
            None,
            false,
        ),
        (
            "proof below the trusted server's own header, which a stranger's words broke",
            mail(
                "k@x",
                "Re: Lunch",
                &format!("Authentication-Results: mx.example.org; spf=fail (of\r\n{PROVED}{by_header}"),
                "Eight.",
            ),
            None,
            false,
        ),
        (
            "proof of a server that is not trusted",
            mail(
                "i@x",
                "Re: Lunch",
                &format!("{}{by_header}", PROVED.replace("mx.example.org", "mx.evil.org")),
                "Six.",
            ),
            None,
            false,
        ),
        ("a forged address", eve("j@x", &by_header), Some(&forged), false),
    ]
    .into_iter()
    .enumerate()
    {
        let mut request = request(&client, body);
        if let Some(rcpt) = rcpt {
            request = request.header("rcpt", rcpt);
        }
        let (status, answer) = sent(request).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{what}: {answer}");
        let joined = conversation_of(&client, answer["session_id"].as_str().unwrap()).await == conversation;
        assert_eq!(joined, joins, "{at}: {what}");
    }
}

#[tokio::test]
async fn a_further_mail_has_a_session_of_its_own_that_knows_the_thread() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let session_id = first(&client).await;
    let (delivery_id, _) = reply(&database, &session_id).await;
    let quoted =
        "At noon?\r\n\r\nOn Sat, 31 Jan 2026 at 12:00, Support <support@example.org> wrote:\r\n> Gladly.";
    let headers = format!("{PROVED}In-Reply-To: <{delivery_id}@example.org>\r\n");
    let second = taken(&client, mail("m2@example.com", "Re: Lunch", &headers, quoted)).await;
    assert_ne!(second, session_id);
    let session = client.wait_for(&second, "completed").await;
    let said = texts(&session, "user");
    assert!(said[0].ends_with("\n\nAt noon?"), "the quoted text is left out: {said:?}");
    let body: Value = serde_json::from_str(model.bodies().last().unwrap()).unwrap();
    let roles: Vec<&str> =
        body["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user"]);
    assert!(body["messages"][1]["content"].to_string().contains("Shall we have lunch?"), "{body}");
    assert!(body["messages"][2]["content"].to_string().contains("Gladly."), "{body}");
    let (_, route) = reply(&database, &second).await;
    assert_eq!(route["in_reply_to"], "m2@example.com");
}

#[tokio::test]
async fn a_mail_that_answers_a_question_goes_on_with_the_session_that_asked() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("ask_user", json!({"question": "For how many?"})),
        _ => Answer::text("Reserved."),
    })
    .await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let asked = taken(&client, mail("m1@example.com", "Table", "", "A table, please.")).await;
    client.wait_for(&asked, "waiting_input").await;
    let (_, route) = reply(&database, &asked).await;
    let plus = route["reply_to"].as_str().unwrap();
    let answer = mail("m2@example.com", "Re: Table", "", "Four.");
    let (status, woken) = sent(request(&client, answer.clone()).header("rcpt", plus)).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    assert_eq!((&woken["session_id"], &woken["items"][0]["outcome"]), (&json!(asked), &json!("delivered")));
    let session = client.wait_for(&asked, "completed").await;
    assert!(texts(&session, "tool")[0].ends_with("Four."), "{session}");
    let (status, again) = sent(request(&client, answer).header("rcpt", plus)).await;
    assert_eq!((status, &again["session_id"]), (StatusCode::OK, &json!(asked)));
}

#[tokio::test]
async fn a_mail_that_looks_like_a_loop_answers_no_question() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| match body.to_string().contains("A table, please.") {
        true if turns_since_user(body) == 0 => Answer::call("ask_user", json!({"question": "For how many?"})),
        _ => Answer::text("Reserved."),
    })
    .await;
    let process = options(&model).env("WAKEFUL_EMAIL__LOOP_LIMIT", "1").serve(&database).await;
    let client = process.client();
    let asked = taken(&client, mail("m1@example.com", "Table", "", "A table, please.")).await;
    client.wait_for(&asked, "waiting_input").await;
    let (_, route) = reply(&database, &asked).await;
    let plus = route["reply_to"].as_str().unwrap();
    let answer = mail("m2@example.com", "Re: Table", "", "Four.");
    let (status, woken) = sent(request(&client, answer).header("rcpt", plus)).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{woken}");
    let woken = woken["session_id"].as_str().unwrap();
    assert_ne!(woken, asked);
    assert!(!policy(&database, woken).await["loop_suspicion"].as_array().unwrap().is_empty());
    assert_eq!(client.session(&asked).await["status"], "waiting_input");
}

#[tokio::test]
async fn of_a_long_thread_a_further_session_is_given_the_newest_and_no_more_than_is_allowed() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let session_id = first(&client).await;
    let (_, route) = reply(&database, &session_id).await;
    let plus = route["reply_to"].as_str().unwrap();
    let mut last = String::new();
    for at in 0..7 {
        let long = format!("Part {at}. {}", "all work and no play ".repeat(1000));
        let body = mail(&format!("long{at}@x"), "Re: Lunch", "", &long);
        let (status, woken) = sent(request(&client, body).header("rcpt", plus)).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{woken}");
        last = woken["session_id"].as_str().unwrap().to_owned();
        client.wait_for(&last, "completed").await;
    }
    let seeds: Vec<String> = sqlx::query_scalar(
        "select content from session_seed_messages where session_id = $1 and role = 'user' order by ordinal",
    )
    .bind(&last)
    .fetch_all(&database.pool)
    .await
    .unwrap();
    assert!(seeds.iter().all(|text| text.len() <= (16 << 10) + 8), "each is cut");
    assert!(seeds.iter().map(String::len).sum::<usize>() <= 64 << 10, "and so are all of them");
    assert!(seeds.last().unwrap().contains("Part 5."), "the newest is among them");
    assert!(!seeds.iter().any(|text| text.contains("Part 0.")), "and the oldest is not");
}

#[tokio::test]
async fn a_question_that_was_asked_in_a_chat_is_not_answered_by_mail() {
    let database = Database::new().await;
    let model = ModelServer::start(|body, _| {
        let messages = body["messages"].as_array().expect("messages");
        match messages.last().and_then(|last| last["content"].as_str()) {
            Some("Ask me.") => Answer::call("ask_user", json!({"question": "Which?"})),
            _ => Answer::text("Gladly."),
        }
    })
    .await;
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let mailed = first(&client).await;
    let (_, route) = reply(&database, &mailed).await;
    let conversation = conversation_of(&client, &mailed).await;
    let (status, begun) = client.post(&format!("/v1/conversations/{conversation}/new"), &json!({})).await;
    assert_eq!(status, StatusCode::CREATED, "{begun}");
    let asking = begun["session_id"].as_str().unwrap();
    assert_eq!(client.chat(&conversation, "Ask me.").await["session_id"], begun["session_id"]);
    client.wait_for(asking, "waiting_input").await;
    // The session keeps the list of addresses it may write to, although it does not reply by mail.
    let rules = policy(&database, asking).await;
    assert_eq!((&rules["participants"], &rules["reply"]), (&json!(["ann@example.com"]), &Value::Null));

    let plus = route["reply_to"].as_str().unwrap();
    let further = mail("m2@example.com", "Re: Lunch", "", "That one.");
    let (status, woken) = sent(request(&client, further).header("rcpt", plus)).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{woken}");
    let woken = woken["session_id"].as_str().unwrap();
    assert_ne!(woken, asking);
    assert_eq!(conversation_of(&client, woken).await, conversation);
    assert_eq!(client.session(asking).await["question"], "Which?");
}

#[tokio::test]
async fn who_got_a_mail_takes_part_only_where_its_sender_is_proved() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let session_id = first(&client).await;
    let (_, route) = reply(&database, &session_id).await;
    let plus = route["reply_to"].as_str().unwrap();
    let crowd: Vec<String> = (1..50).map(|n| format!("v{n}@example.net")).collect();
    let cc = format!("Cc: {}\r\n", crowd.join(", "));
    for (what, id, headers, rcpt, participants) in [
        ("nothing", "a@x", cc.clone(), None, 1),
        ("another's pass", "b@x", format!("{}{cc}", PROVED.replace("=example.com", "=x")), None, 1),
        ("a pass", "c@x", format!("{PROVED}{cc}"), None, 50),
        ("a signed address", "d@x", cc, Some(plus), 50),
    ] {
        let mut request = request(&client, mail(id, what, &headers, "Write to all of them."));
        if let Some(rcpt) = rcpt {
            request = request.header("rcpt", rcpt);
        }
        let (status, answer) = sent(request).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{what}: {answer}");
        let rules = policy(&database, answer["session_id"].as_str().unwrap()).await;
        let found = rules["participants"].as_array().unwrap();
        assert_eq!((found.len(), &found[0]), (participants, &json!("ann@example.com")), "{what}");
    }
}

#[tokio::test]
async fn a_mail_by_two_doors_at_once_that_names_two_conversations_wakes_one_session() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let client = process.client();
    let session_id = first(&client).await;
    let (_, route) = reply(&database, &session_id).await;
    let plus = route["reply_to"].as_str().unwrap();
    for at in 0..5 {
        let text = mail(&format!("two{at}@x"), &format!("Doors {at}"), "", &format!("Number {at}."));
        let signed = request(&client, text.clone()).header("rcpt", plus);
        let ((status, one), (other_status, other)) = tokio::join!(sent(signed), post(&client, text));
        let mut statuses = [status, other_status];
        statuses.sort();
        assert_eq!(statuses, [StatusCode::OK, StatusCode::ACCEPTED], "{one} {other}");
        assert_eq!(one["session_id"], other["session_id"]);
    }
}

#[tokio::test]
async fn a_loop_is_counted_in_its_conversation_and_forged_mails_silence_nobody_there() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).env("WAKEFUL_EMAIL__LOOP_LIMIT", "3").serve(&database).await;
    let client = process.client();
    let session_id = first(&client).await;
    let (delivery_id, route) = reply(&database, &session_id).await;
    for at in 0..5 {
        taken(&client, mail(&format!("forged{at}@x"), "Re: Lunch", "", &format!("Forged {at}."))).await;
    }
    let headers = format!("{PROVED}In-Reply-To: <{delivery_id}@example.org>\r\n");
    let id = taken(&client, mail("m2@example.com", "Re: Lunch", &headers, "At noon?")).await;
    assert_eq!(policy(&database, &id).await["reply"]["channel"], "email");
    // The conversation counts these as its third and fourth mail, whatever name the peer uses.
    let plus = route["reply_to"].as_str().unwrap();
    for (at, channel) in [(0, json!("email")), (1, Value::Null)] {
        let peer = mail(&format!("peer{at}@x"), &format!("Other {at}"), "", &format!("Round {at}."))
            .replace("Ann <ann@example.com>", &format!("peer{at}@evil.org"));
        let (status, woken) = sent(request(&client, peer).header("rcpt", plus)).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{woken}");
        let rules = policy(&database, woken["session_id"].as_str().unwrap()).await;
        assert_eq!(rules["reply"]["channel"], channel, "{at}: {rules}");
    }
}

#[tokio::test]
async fn several_people_of_a_thread_may_say_the_same_and_one_may_not_go_on_with_it() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).env("WAKEFUL_EMAIL__LOOP_LIMIT", "50").serve(&database).await;
    let client = process.client();
    let session_id = first(&client).await;
    let (_, route) = reply(&database, &session_id).await;
    let plus = route["reply_to"].as_str().unwrap();
    let agrees = async |id: &str, who: &str| {
        let text = mail(id, "Re: Lunch", "", "Count me in.").replace("Ann <ann@", &format!("{who} <{who}@"));
        let (status, woken) = sent(request(&client, text).header("rcpt", plus)).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{woken}");
        policy(&database, woken["session_id"].as_str().unwrap()).await["loop_suspicion"].to_string()
    };
    for who in ["bob", "cleo", "dan", "eve", "fay"] {
        assert_eq!(agrees(&format!("{who}@x"), who).await, "null", "{who}");
    }
    for (at, suspicion) in [(2, "null"), (3, "null"), (4, "same text has come 4 times")] {
        let found = agrees(&format!("bob{at}@x"), "bob").await;
        assert!(found.contains(suspicion), "{at}: {found}");
    }
}

#[tokio::test]
async fn two_machines_that_answer_each_other_are_cut_off() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).env("WAKEFUL_EMAIL__LOOP_LIMIT", "3").serve(&database).await;
    let client = process.client();
    for at in 0..3 {
        let id = taken(&client, mail(&format!("m{at}@x"), "Re: Hello", "", &format!("Number {at}."))).await;
        assert_eq!(policy(&database, &id).await["reply"]["channel"], "email", "{at}");
    }
    let id = taken(&client, mail("m3@x", "Re: Hello", "", "Number 3.")).await;
    let cut_off = policy(&database, &id).await;
    assert_eq!((&cut_off["reply"], &cut_off["recipients"]), (&Value::Null, &json!([])));
    assert!(cut_off["loop_suspicion"][0].as_str().unwrap().contains("4 mails"), "{cut_off}");
    client.wait_for(&id, "completed").await;
    let sql = "select count(*) from deliveries where session_id = $1";
    assert_eq!(database.value::<i64>(sql, &id).await, 0, "nothing leaves");

    let text = |id: &str| mail(id, "Other", "", "The very same.");
    for at in 1..=3 {
        let id = taken(&client, text(&format!("n{at}@x"))).await;
        assert!(
            !policy(&database, &id).await.to_string().contains("same text"),
            "a person may repeat a word"
        );
    }
    let id = taken(&client, text("n4@x")).await;
    assert!(
        policy(&database, &id).await["loop_suspicion"].to_string().contains("same text has come 4 times")
    );
    let (status, _) = post(&client, text("n2@x")).await;
    assert_eq!(status, StatusCode::OK, "a duplicate does not count as a repetition");
}

use super::*;

fn person(address: &str) -> Person {
    Person { name: None, address: address.to_owned() }
}

fn mail() -> MailFacts {
    MailFacts {
        message_id: Some("m1@example.com".into()),
        from: Some(person("ann@example.com")),
        to: vec![person("support+abc@example.org"), person("bob@example.com")],
        subject: "Lunch".into(),
        ..MailFacts::default()
    }
}

fn rules() -> MailboxRules {
    MailboxRules { own: vec!["support@example.org".into()], ..MailboxRules::default() }
}

#[test]
fn a_person_is_answered() {
    let extracted = extract(&mail(), &rules());
    assert_eq!(extracted.machine, Vec::<String>::new());
    assert_eq!(extracted.participants, ["ann@example.com", "bob@example.com"]);
    for (name, value) in
        [("auto-submitted", "no"), ("precedence", "first-class"), ("x-auto-response-suppress", "None")]
    {
        let facts = MailFacts { machine_headers: vec![(name.into(), value.into())], ..mail() };
        assert!(extract(&facts, &rules()).machine.is_empty(), "{name}: {value}");
    }
}

#[test]
fn the_reason_quotes_no_words_of_the_sender() {
    for (name, value, said) in [
        ("auto-submitted", "auto-replied (a secret)", "it has the header auto-submitted: auto-replied"),
        ("precedence", "Bulk", "it has the header precedence: bulk"),
        ("x-loop", "secret@example.org", "it has the header x-loop"),
        ("auto-submitted", "secret", "it has the header auto-submitted"),
    ] {
        let facts = MailFacts { machine_headers: vec![(name.into(), value.into())], ..mail() };
        assert_eq!(extract(&facts, &rules()).machine, [said]);
    }
}

#[test]
fn a_machine_is_not() {
    let headed = |name: &str, value: &str| MailFacts {
        machine_headers: vec![(name.to_owned(), value.to_owned())],
        ..mail()
    };
    let from = |address: &str| MailFacts { from: Some(person(address)), ..mail() };
    for (what, facts) in [
        ("auto-submitted", headed("auto-submitted", "auto-replied (vacation)")),
        ("auto-submitted", headed("auto-submitted", "auto-generated; x=y")),
        ("bulk", headed("precedence", "Bulk")),
        ("junk", headed("precedence", "junk")),
        ("list", headed("precedence", "list")),
        ("list-id", headed("list-id", "<a.example.org>")),
        ("list-unsubscribe", headed("list-unsubscribe", "<mailto:x@y.z>")),
        ("suppress", headed("x-auto-response-suppress", "All")),
        ("x-loop", headed("x-loop", "support@example.org")),
        ("null path", MailFacts { return_path: Some(String::new()), ..mail() }),
        ("report", MailFacts { report: Some("delivery-status".into()), ..mail() }),
        ("daemon", from("mailer-daemon@example.com")),
        ("no-reply", from("no-reply@example.com")),
        ("no.reply", from("no.reply+17@example.com")),
        ("donotreply", from("donotreply@example.com")),
        ("postmaster", from("postmaster@example.com")),
        ("ourselves", from("support@example.org")),
        ("ourselves with more", from("support+x@example.org")),
        ("nobody", MailFacts { from: None, ..mail() }),
    ] {
        assert_eq!(extract(&facts, &rules()).machine.len(), 1, "{what}");
    }
}

#[test]
fn our_own_mailboxes_are_known_with_and_without_what_follows_a_plus() {
    let rules = MailboxRules { own: vec!["support@example.org".into(), "a+b@example.org".into()], ..rules() };
    for (address, own) in [
        ("Support@Example.org", true),
        ("support+x+y@example.org", true),
        ("a+b@example.org", true),
        ("a+b+c@example.org", true),
        ("a@example.org", false),
        ("a+bc@example.org", false),
        ("supporter@example.org", false),
        ("support@example.com", false),
        ("sup\u{e9}ort", false),
        ("", false),
    ] {
        assert_eq!(is_own(&rules, address), own, "{address}");
    }
}

#[test]
fn a_mailboxes_rules_are_its_sessions_policy() {
    let rules = MailboxRules {
        recipients: Some(vec!["*@example.com".into()]),
        web: Some(WebPolicy { allow: Some(vec!["example.com".into()]), ..WebPolicy::default() }),
        ..rules()
    };
    let extracted = extract(&mail(), &rules);
    let route = reply_route(&mail(), "support@example.org", false, None);
    let policy = of_session(&extracted, Vec::new(), route.clone(), false);
    assert_eq!(policy.recipients, rules.recipients);
    assert!(policy.web.clone().is_some_and(|web| web.allows("example.com")));
    assert_eq!(policy.reply, route);
    let cut_off = of_session(&extracted, vec!["a loop".into()], route, true);
    assert_eq!((cut_off.reply, cut_off.recipients), (None, Some(Vec::new())));
    assert_eq!(cut_off.loop_suspicion, ["a loop"]);
}

#[test]
fn without_proof_only_the_sender_takes_part() {
    let strangers: Vec<Person> = (1..50).map(|n| person(&format!("v{n}@example.net"))).collect();
    let crowd = MailFacts { cc: strangers, ..mail() };
    let capital = MailFacts { from: Some(person("Ann@Example.com")), ..mail() };
    let ourselves = MailFacts { from: Some(person("support+abc@example.org")), ..mail() };
    let nobody = MailFacts { from: None, ..mail() };
    let ann = &["ann@example.com"][..];
    for (what, facts, alone, proved) in [
        ("a crowd", crowd, ann, 50),
        ("two", mail(), ann, 2),
        ("in capitals", capital, ann, 2),
        ("ourselves", ourselves, &[], 1),
        ("nobody", nobody, &[], 1),
    ] {
        let extracted = extract(&facts, &rules());
        let of = |proved| of_session(&extracted, Vec::new(), None, proved).participants;
        assert_eq!(of(false), alone, "{what}");
        assert_eq!(of(true).len(), proved, "{what}");
    }
}

#[test]
fn only_ascii_is_folded_so_that_no_other_mailbox_is_taken_for_a_persons() {
    assert_eq!(person_of("Ann+x@Example.com"), "ann@example.com");
    // The Kelvin sign.
    let other = "\u{212a}im@example.com";
    assert_ne!(person_of(other), person_of("kim@example.com"));
    let facts = MailFacts { from: Some(person("kim@example.com")), cc: vec![person(other)], ..mail() };
    let participants = extract(&facts, &rules()).participants;
    assert_eq!(participants, ["kim@example.com", "bob@example.com", other]);
}

#[test]
fn a_loop_is_suspected_after_the_limit_and_when_a_text_comes_again() {
    for (mails, same_body, reasons) in [(0, 0, 0), (9, 0, 0), (10, 0, 1), (3, 2, 0), (3, 3, 1), (10, 3, 2)] {
        assert_eq!(
            loop_suspicion(Exchange { mails, same_body, ..Exchange::default() }, 10).len(),
            reasons,
            "{mails} {same_body}"
        );
    }
}

#[test]
fn a_reply_goes_to_its_sender_and_elsewhere_only_where_the_sender_is_known() {
    let to = |reply_to: &[&str], dmarc: bool| {
        let reply_to = reply_to.iter().map(|one| person(one)).collect();
        let route = reply_route(&MailFacts { reply_to, ..mail() }, "s@example.org", dmarc, None).unwrap();
        route.to["to"][0].as_str().unwrap().to_owned()
    };
    for (reply_to, dmarc, expected) in [
        (&[][..], false, "ann@example.com"),
        (&["desk@example.com"], false, "desk@example.com"),
        (&["eve@evil.org"], false, "ann@example.com"),
        (&["ann@private.org"], true, "ann@private.org"),
    ] {
        assert_eq!(to(reply_to, dmarc), expected, "{reply_to:?} {dmarc}");
    }
    assert_eq!(reply_route(&MailFacts::default(), "s@example.org", true, None), None);
}

#[test]
fn a_reply_names_what_it_answers() {
    let facts = MailFacts { references: vec!["a@x".into(), "b@x".into()], ..mail() };
    let route = reply_route(&facts, "Help <s@example.org>", false, Some("s+t@example.org".into())).unwrap();
    assert_eq!(
        route.to,
        json!({
            "from": "Help <s@example.org>", "to": ["ann@example.com"], "cc": [], "subject": "Re: Lunch",
            "in_reply_to": "m1@example.com", "references": ["a@x", "b@x", "m1@example.com"],
            "reply_to": "s+t@example.org",
        })
    );
    let again = MailFacts { subject: "RE: Lunch".into(), ..mail() };
    assert_eq!(reply_route(&again, "s@x", false, None).unwrap().to["subject"], "RE: Lunch");
    let long = MailFacts { references: (0..100).map(|n| format!("{n}@x")).collect(), ..mail() };
    let route = reply_route(&long, "s@x", false, None).unwrap();
    let references = route.to["references"].as_array().unwrap();
    assert_eq!((references.len(), &references[19]), (20, &json!("m1@example.com")));
}

#[test]
fn what_follows_an_answer_answers_it_in_the_thread_of_the_question() {
    let asked = reply_route(&mail(), "s@example.org", false, Some("s+t@example.org".into())).unwrap();
    let of = |from: &str, references: &[&str], proved: bool| {
        let facts = MailFacts {
            message_id: Some("m2@example.com".into()),
            from: Some(person(from)),
            references: references.iter().map(|id| (*id).to_owned()).collect(),
            subject: "Re: Lunch".into(),
            ..MailFacts::default()
        };
        let answer = reply_route(&facts, "s@example.org", proved, Some("s+t@example.org".into())).unwrap();
        route_after_answer(&asked, Some("q@example.org"), &answer, proved).to
    };
    let (ann, bob) = (json!(["ann@example.com"]), json!(["bob@example.com"]));
    let thread = json!(["m1@example.com", "q@example.org", "m2@example.com"]);
    for (what, from, references, proved, to, cc) in [
        (
            "names the thread",
            "ann@example.com",
            &["m1@example.com", "q@example.org"][..],
            false,
            &ann,
            json!([]),
        ),
        ("names nothing", "Ann@example.com", &[], false, &ann, json!([])),
        ("somebody else", "bob@example.com", &["q@example.org"], true, &bob, ann.clone()),
        ("somebody else, unproved", "bob@example.com", &[], false, &ann, json!([])),
    ] {
        let route = of(from, references, proved);
        assert_eq!(route["references"], thread, "{what}");
        assert_eq!(route["in_reply_to"], "m2@example.com", "{what}");
        assert_eq!((&route["to"], &route["cc"]), (to, &cc), "{what}");
        assert_eq!(route["reply_to"], "s+t@example.org", "{what}");
    }
    let forged: Vec<String> = (0..30).map(|n| format!("{n}@x")).collect();
    let route = of("ann@example.com", &forged.iter().map(String::as_str).collect::<Vec<_>>(), false);
    let references = route["references"].as_array().unwrap();
    assert_eq!(references.len(), REFERENCES);
    assert_eq!((&references[0], &references[19]), (&json!("m1@example.com"), &json!("m2@example.com")));
}

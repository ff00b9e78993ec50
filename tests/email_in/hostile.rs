//! Mail built to cost more than it is worth: each is answered within 256 MiB, and within the CPU of a few plain mails of the most
//! bytes.

use super::{mail, options, request, says, taken};
use crate::support::{Database, Process};
use reqwest::StatusCode;
use std::time::Duration;

/// How many times the CPU of a plain mail a hostile one may cost.
const TIMES: f64 = 10.0;

/// CPU seconds that the process has used.
fn cpu_s(process: &Process) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid())).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // SAFETY: sysconf takes no pointers.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / ticks
}

#[tokio::test]
async fn hostile_shapes_cost_no_more_than_plain_mails_and_256_mib() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).arg("--roles=api").serve(&database).await;
    let client = process.client();
    let parts = "--b\r\n\r\n\r\n".repeat(1_000_000);
    let multipart = "MIME-Version: 1.0\r\nContent-Type: multipart/mixed; boundary=b\r\n";
    let deep: String = (0..1000)
        .map(|at| format!("Content-Type: multipart/mixed; boundary=b{at}x\r\n\r\n--b{at}x\r\n"))
        .collect();
    let mails = "Content-Type: message/rfc822\r\n\r\n".repeat(1000);
    let nest = format!("x--b\r\n{}", "Content-Type: message/rfc822\r\n\r\n".repeat(30_000));
    let words = "=?utf-8?q?=41?= ".repeat(3_500);
    let people = "a@b.de, ".repeat(7_000);
    let html = format!("{}x", "<div><table><td>".repeat(600_000));
    let cases: Vec<(&str, String, &[u16])> = vec![
        ("39 MB of text", mail("i@x", "x", "", &("a b c d e ".repeat(7) + "\r\n").repeat(560_000)), &[202]),
        ("100 MB", mail("a@x", "x", "", &"a".repeat(100 << 20)), &[413]),
        ("a million parts", mail("b@x", "x", multipart, &parts), &[422]),
        ("mails in each other after a boundary within a line", mail("j@x", "x", multipart, &nest), &[422]),
        (
            "millions of boundaries within lines",
            mail("k@x", "x", multipart, &"x--b\r\n\r\n".repeat(4_000_000)),
            &[422],
        ),
        ("depth 1,000", format!("From: a@b.de\r\nTo: support@example.org\r\n{deep}\r\nx"), &[422]),
        (
            "a thousand mails in each other",
            format!("From: a@b.de\r\nTo: support@example.org\r\n{mails}\r\nx"),
            &[422],
        ),
        ("1 MB of headers", mail("c@x", "x", &format!("X-A: {}\r\n", "a".repeat(1 << 20)), "x"), &[422]),
        ("encoded words", mail("d@x", &words, "", "x"), &[202]),
        ("addresses", mail("e@x", "x", &format!("Cc: {people}\r\n"), "x"), &[202]),
        (
            "bad charsets",
            mail(
                "f@x",
                "=?nonsense?q?=ff?= =?utf-7?b?!!?=",
                "Content-Type: text/plain; charset=utf-99\r\n",
                "x\u{ff}",
            ),
            &[202],
        ),
        ("html", mail("g@x", "x", "Content-Type: text/html\r\n", &html), &[202]),
        (
            "39 MB of base64",
            mail(
                "h@x",
                "x",
                "Content-Type: application/x\r\nContent-Transfer-Encoding: base64\r\n",
                &("QUFB".repeat(19) + "\r\n").repeat(520_000),
            ),
            &[202],
        ),
    ];
    // What the first one costs, which is as plain as a mail can be.
    let mut plain = None;
    for (what, body, expected) in cases {
        let before = cpu_s(&process);
        // A server that refuses a body by its length does not read it, so the client may see the connection
        // close.
        let status =
            match tokio::time::timeout(Duration::from_secs(60), request(&client, body).send()).await.unwrap()
            {
                Ok(response) => response.status().as_u16(),
                Err(error) if error.is_request() => 413,
                Err(error) => panic!("{what}: {error}"),
            };
        let (cpu, peak) = (cpu_s(&process) - before, process.peak_mib());
        println!("{what}: {status}, {cpu:.2} s of CPU, at most {peak} MiB so far");
        assert!(expected.contains(&status), "{what}: {status}");
        let plain = *plain.get_or_insert(cpu);
        assert!(cpu <= TIMES * plain, "{what}: {cpu} s, and a plain mail {plain} s");
        assert!(peak <= 256, "{what}: {peak} MiB");
    }
    taken(&client, mail("z@example.com", "Lunch", "", "Shall we?")).await;
    assert_eq!(client.get("/healthz").await.0, StatusCode::OK);
}

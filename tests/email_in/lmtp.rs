//! LMTP, spoken line by line.

use super::{SUPPORT, count, mail, options, policy, says, sessions};
use crate::support::{Database, Process, Server, timeout};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// The sending mail server's side of a connection.
pub(super) struct Lmtp {
    lines: Lines<BufReader<OwnedReadHalf>>,
    writer: OwnedWriteHalf,
}

impl Lmtp {
    pub async fn connect(process: &Process) -> Lmtp {
        let line = process.wait_for_log("\"Listening for LMTP\"").await;
        let line: Value = serde_json::from_str(&line).unwrap();
        let stream = TcpStream::connect(line["listen"].as_str().unwrap()).await.unwrap();
        let (reader, writer) = stream.into_split();
        let mut lmtp = Lmtp { lines: BufReader::new(reader).lines(), writer };
        assert!(lmtp.reply().await.unwrap().starts_with("220"));
        lmtp
    }

    pub async fn greeted(process: &Process) -> Lmtp {
        let mut lmtp = Lmtp::connect(process).await;
        lmtp.say("LHLO mx.example.org", "250").await;
        lmtp
    }

    /// The last line of a reply, or `None` if the connection ended.
    pub async fn reply(&mut self) -> Option<String> {
        loop {
            let line = tokio::time::timeout(timeout(), self.lines.next_line()).await.expect("a reply");
            let line = line.ok().flatten()?;
            if line.as_bytes().get(3) != Some(&b'-') {
                return Some(line);
            }
        }
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        self.writer.write_all(bytes).await.unwrap();
    }

    pub async fn say(&mut self, command: &str, expected: &str) -> String {
        self.write(format!("{command}\r\n").as_bytes()).await;
        let reply = self.reply().await.expect("the connection is open");
        assert!(reply.starts_with(expected), "{command}: {reply}");
        reply
    }

    /// Sends the text of a mail and its end, and returns the first reply.
    pub async fn end(&mut self, text: &str) -> Option<String> {
        self.write(text.replace("\r\n.", "\r\n..").as_bytes()).await;
        self.write(b".\r\n").await;
        self.reply().await
    }

    pub async fn send(&mut self, to: &str, text: &str) -> String {
        self.say("MAIL FROM:<ann@example.com>", "250").await;
        self.say(&format!("RCPT TO:<{to}>"), "250").await;
        self.say("DATA", "354").await;
        self.end(text).await.expect("a reply")
    }
}

#[tokio::test]
async fn a_mail_is_taken_for_each_recipient_and_refused_for_a_stranger() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let mut lmtp = Lmtp::greeted(&process).await;
    lmtp.say("MAIL FROM:<ann@example.com> SIZE=200 BODY=8BITMIME SMTPUTF8", "250").await;
    lmtp.say(&format!("RCPT TO:<{SUPPORT}>"), "250").await;
    lmtp.say("RCPT TO:<nobody@example.org>", "550").await;
    lmtp.say("RCPT TO:<Sales+x@Example.org>", "250").await;
    lmtp.say("DATA", "354").await;
    let first = lmtp.end(&mail("m1@example.com", "Lunch", "", "Grüße\r\n.\r\n..two")).await.unwrap();
    let second = lmtp.reply().await.unwrap();
    assert!(first.starts_with("250") && second.starts_with("250"), "{first} {second}");
    let session_id = first.rsplit(' ').next().unwrap();
    let session = process.client().wait_for(session_id, "completed").await;
    let said = crate::support::client::texts(&session, "user");
    assert!(said[0].ends_with("Grüße\n.\n..two"), "dots are given back: {said:?}");
    assert_eq!(sessions(&database).await, 2);
    // Machine mail is accepted from its server but not shown to an agent.
    lmtp.say("MAIL FROM:<>", "250").await;
    lmtp.say(&format!("RCPT TO:<{SUPPORT}>"), "250").await;
    lmtp.say("DATA", "354").await;
    let dropped = lmtp.end(&mail("m2@example.com", "Away", "", "x")).await.unwrap();
    assert!(dropped.starts_with("250"), "{dropped}");
    assert_eq!(count(&database, "select count(*) from mails where dropped is not null and $1 = ''").await, 1);
    lmtp.say("QUIT", "221").await;
    assert!(policy(&database, session_id).await["reply"].is_object());
}

#[tokio::test]
async fn what_is_out_of_order_or_hostile_is_refused_and_the_next_mail_is_taken() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let mut lmtp = Lmtp::connect(&process).await;
    lmtp.say("MAIL FROM:<ann@example.com>", "503").await;
    lmtp.say("EHLO x", "500").await;
    lmtp.say("LHLO x", "250").await;
    lmtp.say("RCPT TO:<support@example.org>", "503").await;
    lmtp.say("DATA", "503").await;
    lmtp.say("NONSENSE", "500").await;
    lmtp.say("STARTTLS", "502").await;
    lmtp.say("NOOP", "250").await;
    lmtp.say("MAIL FROM:<ann@example.com> SIZE=99999999", "552").await;
    lmtp.say("MAIL FROM:<ann@example.com>", "250").await;
    lmtp.say("RSET", "250").await;
    lmtp.say("RCPT TO:<support@example.org>", "503").await;
    let deep = (0..40)
        .map(|at| format!("Content-Type: multipart/mixed; boundary=b{at}x\r\n\r\n--b{at}x\r\n"))
        .collect::<String>();
    let reply = lmtp.send(SUPPORT, &format!("From: a@b.de\r\n{deep}\r\nx\r\n")).await;
    assert!(reply.starts_with("554 5.6.0"), "{reply}");
    // All commands at once, as a server that uses PIPELINING sends them.
    let text = mail("m1@example.com", "Lunch", "", "Shall we?");
    lmtp.write(b"MAIL FROM:<ann@example.com>\r\nRCPT TO:<support@example.org>\r\nDATA\r\n").await;
    for code in ["250", "250", "354"] {
        assert!(lmtp.reply().await.unwrap().starts_with(code));
    }
    assert!(lmtp.end(&text).await.unwrap().starts_with("250"));
    // A line end that another server could take for the end of the mail, and commands after it.
    lmtp.say("MAIL FROM:<ann@example.com>", "250").await;
    lmtp.say(&format!("RCPT TO:<{SUPPORT}>"), "250").await;
    lmtp.say("DATA", "354").await;
    lmtp.write(b"From: a@b.de\r\n\r\nx\n.\r\nMAIL FROM:<evil@example.com>\r\n.\r\n").await;
    assert!(lmtp.reply().await.unwrap().starts_with("554"));
    assert_eq!(lmtp.reply().await, None, "and the connection ends");
    assert_eq!(sessions(&database).await, 1);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_mail_stays_with_its_server_while_the_database_is_away() {
    let model = says("Gladly.").await;
    let mut server = Server::start().await;
    let database = Database::on(&server.url(), "pg_default").await;
    let process = options(&model).serve(&database).await;
    let mut lmtp = Lmtp::greeted(&process).await;
    let text = mail("m1@example.com", "Lunch", "", "Shall we?");
    server.stop().await;
    let reply = lmtp.send(SUPPORT, &text).await;
    assert!(reply.starts_with("451"), "{reply}");
    server.start_again().await;
    crate::support::eventually("the mail to be taken", || async {
        let reply = Lmtp::greeted(&process).await.send(SUPPORT, &text).await;
        reply.starts_with("250").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_process_that_drains_takes_the_mail_in_hand_and_no_further_one() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let process = options(&model).serve(&database).await;
    let mut idle = Lmtp::greeted(&process).await;
    let mut busy = Lmtp::greeted(&process).await;
    busy.say("MAIL FROM:<ann@example.com>", "250").await;
    busy.say(&format!("RCPT TO:<{SUPPORT}>"), "250").await;
    busy.say("DATA", "354").await;
    process.signal(libc::SIGTERM);
    process.wait_for_log("Draining").await;
    assert!(idle.reply().await.unwrap().starts_with("421"));
    let reply = busy.end(&mail("m1@example.com", "Lunch", "", "Shall we?")).await.unwrap();
    assert!(reply.starts_with("250"), "{reply}");
    assert!(busy.reply().await.unwrap().starts_with("421"));
    let (status, _) = process.ended().await;
    assert!(status.success());
    assert_eq!(sessions(&database).await, 1);
}

#[tokio::test]
async fn only_the_listed_servers_may_speak() {
    let (database, model) = (Database::new().await, says("Gladly.").await);
    let lmtp = |listen: &str, peers: &str| {
        let options = options(&model).env("WAKEFUL_EMAIL__LMTP_LISTEN", listen);
        if peers.is_empty() { options } else { options.env("WAKEFUL_EMAIL__LMTP_PEERS", peers) }
    };
    // Others could reach it, and nothing says who may speak.
    let open = lmtp("0.0.0.0:0", "").spawn(&database.url);
    open.wait_for_log("email.lmtp_peers").await;
    open.ended().await;
    for (peers, may) in [("192.0.2.7,127.0.0.1", true), ("127.0.0.0/8", true), ("192.0.2.0/24", false)] {
        let process = lmtp("0.0.0.0:0", peers).serve(&database).await;
        let line = process.wait_for_log("\"Listening for LMTP\"").await;
        let line: Value = serde_json::from_str(&line).unwrap();
        let port = line["listen"].as_str().unwrap().rsplit(':').next().unwrap().to_owned();
        let stream = TcpStream::connect(format!("127.0.0.1:{port}")).await.unwrap();
        let said = BufReader::new(stream).lines().next_line().await.unwrap().unwrap_or_default();
        assert_eq!(said.starts_with("220"), may, "{peers}: {said}");
    }
}

//! Forged bundles: each is refused at once with its reason, and nothing is written.

use super::bundle::{export, rows, try_import};
use super::made_up::*;
use super::world::*;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::io::Write as _;
use std::time::{Duration, Instant};
use wakeful_store::Error;
use wakeful_store::step::Commit;
use wakeful_workflow::advance::Performed;

/// Lines of a bundle, for a test to damage.
#[derive(Clone)]
pub(super) struct Lines(pub(super) Vec<String>);

impl Lines {
    pub(super) fn of(bundle: &[u8]) -> Lines {
        let mut lines: Vec<String> =
            String::from_utf8(bundle.to_vec()).unwrap().lines().map(str::to_owned).collect();
        lines.pop().expect("the checksum");
        Lines(lines)
    }

    /// The index of a section's first line.
    fn at(&self, section: &str) -> usize {
        let begins = format!("{{\"{section}\":");
        self.0.iter().position(|line| line.starts_with(&begins)).expect(section)
    }

    /// Replaces a text in the first line of the section that contains it. Panics if there is no such line.
    pub(super) fn replace(mut self, section: &str, from: &str, to: &str) -> Lines {
        let begins = format!("{{\"{section}\":");
        let found = self.0.iter_mut().find(|line| line.starts_with(&begins) && line.contains(from));
        let line = found.unwrap_or_else(|| panic!("no {section} with {from}"));
        *line = line.replacen(from, to, 1);
        self
    }

    fn without(mut self, section: &str) -> Lines {
        self.0.remove(self.at(section));
        self
    }

    fn twice(mut self, section: &str) -> Lines {
        let at = self.at(section);
        self.0.insert(at, self.0[at].clone());
        self
    }

    fn with(mut self, at: usize, line: &str) -> Lines {
        self.0.insert(at, line.to_owned());
        self
    }

    /// The bundle with a valid checksum, which a forger can compute too.
    pub(super) fn sealed(&self) -> Vec<u8> {
        let mut bytes = self.0.iter().flat_map(|line| [line.as_bytes(), b"\n"].concat()).collect::<Vec<_>>();
        let sha256 = hex::encode(Sha256::digest(&bytes));
        bytes.extend(format!("{{\"sha256\":\"{sha256}\"}}\n").as_bytes());
        bytes
    }
}

fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut packer = GzEncoder::new(Vec::new(), Compression::best());
    packer.write_all(bytes).unwrap();
    packer.finish().unwrap()
}

/// A session with a file, a mail, a guarded call, and a state large enough for a blob.
async fn session(world: &World) -> String {
    let session_id = world.wake("c1", "Write it down.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    let (file, charge, mail) =
        (call("call_f", "write_file"), call("call_g", "charge"), call("call_m", "compose_email"));
    driver.continues(replied(vec![asks(&file), asks(&charge), asks(&mail)])).await;
    let written = json!({"type": "fileWritten", "path": "notes.md", "bytes": 2, "sha256": "00"});
    let sent =
        json!({"type": "sentEmail", "to": ["bob@example.com"], "subject": "x".repeat(3000), "body": "Hi."});
    let charged = done("Charged.", None);
    driver.settle(&charge, &charged).await;
    let called = vec![
        performed(&file, done("Wrote 2 bytes.", Some(written))),
        performed(&charge, charged),
        performed(&mail, done("Queued.", Some(sent))),
    ];
    driver.continues(Performed::Called(called)).await;
    assert_eq!(driver.commit(replied(vec![text("Done.")])).await, Commit::Closed { opened: false });
    session_id
}

#[tokio::test]
async fn each_hostile_bundle_is_refused_with_its_reason_in_under_a_second_and_nothing_is_written() {
    let world = World::new().await;
    let session_id = session(&world).await;
    let bundle = export(&world.store, &session_id).await;
    let good = Lines::of(&bundle);
    assert_eq!(good.sealed(), bundle);
    let run_id = rows(&bundle, "run")[0]["run_id"].as_str().unwrap().to_owned();
    let count = |section: &str| rows(&bundle, section).len();
    let deep = format!("{}1{}", "[".repeat(100), "]".repeat(100));
    let blob = &good.0[good.at("blob")];
    let header_gone = Lines(good.0[1..].to_vec());
    let state = "\"state\":{\"email/call_m\":";
    let invalid = {
        let mut bytes = good.clone().replace("seed", "You are", "QQQQ").sealed();
        let at = bytes.windows(4).position(|text| text == b"QQQQ").unwrap();
        bytes.splice(at..at + 4, [0xc3, 0x28]);
        bytes
    };
    let raw_nul = {
        let mut bytes = bundle.clone();
        bytes[30] = 0;
        bytes
    };
    let mut damaged = packed(&bundle);
    // Damage the checksum at the end of the packed file. The content unpacks whole; only the checksum shows
    // that it is not what was packed.
    let checksum_at = damaged.len() - 8;
    damaged[checksum_at] ^= 0xff;
    let after_the_end = [bundle.clone(), good.0[1].clone().into_bytes(), b"\n".to_vec()].concat();
    let checksum = {
        let mut bytes = bundle.clone();
        let at = bytes.len() - 10;
        bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
        bytes
    };

    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("a checksum that does not fit", checksum, "the checksum does not fit"),
        ("a byte that was changed", good.clone().replace("record", "Write it", "Wrote it").0.join("\n").into_bytes(), "cut off"),
        ("no last line", [good.0.join("\n").as_bytes(), b"\n"].concat(), "before its last line"),
        ("cut in mid-line", bundle[..bundle.len() / 2].to_vec(), "cut off"),
        ("nothing", Vec::new(), "it is empty"),
        ("no JSON", b"\x7fELF and so on\n".to_vec(), "no bundle of Wakeful"),
        ("no header", header_gone.sealed(), "no bundle of Wakeful"),
        ("two headers", good.clone().with(1, &good.0[0]).sealed(), "it is no row"),
        ("a later version", { let mut later = good.clone(); later.0[0] = later.0[0].replacen("\"wakeful_bundle\":1", "\"wakeful_bundle\":2", 1); later.sealed() }, "version 2 of the format"),
        ("a giant line", [good.0[0].as_bytes(), b"\n{\"seed\":\"", &vec![b'x'; 9 << 20], b"\"}\n"].concat(), "longer than 8388608 bytes"),
        ("deep values", good.clone().replace("record", "\"details\":{", &format!("\"details\":{{\"a\":{deep},")).sealed(), "more than 64 deep"),
        ("many values", good.clone().replace("record", "\"details\":{", &format!("\"details\":{{\"a\":[{}0],", "0,".repeat(200_000))).sealed(), "more than 100000 values"),
        ("a bomb of one line", packed(&vec![b' '; 16 << 20]), "times its size"),
        ("a packed file that is damaged", damaged, "damaged"),
        ("more records than anyone has", { let mut many = good.clone(); many.0[0] = many.0[0].replacen(&format!("\"records\":{}", count("record")), "\"records\":300000", 1); many.sealed() }, "300000 records"),
        ("counts that are not so", { let mut more = good.clone(); more.0[0] = more.0[0].replacen(&format!("\"records\":{}", count("record")), &format!("\"records\":{}", count("record") + 1), 1); more.sealed() }, "the header promises"),
        ("a message twice", good.clone().twice("record").sealed(), "stands where"),
        ("a file fact that leads out", good.clone().replace("record", "\"path\":\"notes.md\"", "\"path\":\"../../.ssh/keys\"").sealed(), "leads out of the workspace"),
        ("a state key that leads out", good.clone().replace("session", "file/notes.md", "file//etc/passwd").sealed(), "leads out of the workspace"),
        ("an id that is a path", good.clone().replace("record", "\"message_id\":\"msg_", "\"message_id\":\"../msg_").sealed(), "message_id"),
        ("another session's row", good.clone().replace("session", &session_id, "sess_another").sealed(), "is not the header's"),
        ("a foreign run", good.clone().replace("step", &run_id, "run_another").sealed(), "which is not in here"),
        ("a message number left out", { let mut sparse = good.clone().without("record"); sparse.0[0] = sparse.0[0].replacen(&format!("\"records\":{}", count("record")), &format!("\"records\":{}", count("record") - 1), 1); sparse.sealed() }, "stands where"),
        ("an entry that points nowhere", good.clone().replace("event", "\"message_number\":3", "\"message_number\":2").sealed(), "which is not there"),
        ("an inbox row that is missing", { let mut less = good.clone().without("inbox"); less.0[0] = less.0[0].replacen("\"inbox\":1", "\"inbox\":0", 1); less.sealed() }, "inbox row"),
        ("an unknown entry", good.clone().replace("event", "\"type\":\"GEN_START\"", "\"type\":\"GEN_MAYBE\"").sealed(), "none that this version knows"),
        ("a blob of another hash", good.clone().replace("blob", "\"base64\":\"ey", "\"base64\":\"ez").sealed(), "has another hash"),
        ("a blob that is missing", good.clone().without("blob").sealed(), "which is missing"),
        ("a blob for nobody", good.clone().with(good.at("blob"), &format!("{{\"blob\":{{\"sha256\":\"{}\",\"media_type\":\"text/plain\",\"bytes\":0,\"at\":0,\"base64\":\"\"}}}}", "0".repeat(64))).sealed(), "no row points at"),
        ("a blob twice", good.clone().with(good.at("blob"), blob).sealed(), "each once"),
        ("an escaped NUL", good.clone().replace("seed", "You are", "\\u0000").sealed(), "escaped NUL"),
        ("a NUL", raw_nul, "has a NUL"),
        ("no UTF-8", invalid, "not UTF-8"),
        ("a line after the last", after_the_end, "after the last one"),
        ("steps that do not fit", good.clone().replace("step", "\"from_message_number\":1", "\"from_message_number\":2").sealed(), "does not begin where"),
        ("sums that are none", good.clone().replace("session", "\"total_cost_micros\":14", "\"total_cost_micros\":0").sealed(), "not the sums"),
        ("a state that no message made", good.clone().replace("session", state, "\"state\":{\"admin\":true,\"email/call_m\":").sealed(), "not what its messages make"),
        ("a status that the journal denies", good.clone().replace("session", "\"status\":\"completed\"", "\"status\":\"running\"").sealed(), "not what its journal says"),
        ("an unknown field", good.clone().replace("call", "\"attempts\":", "\"start_nonce\":\"x\",\"attempts\":").sealed(), "not in its one form"),
        ("a field twice", good.clone().replace("run", "\"status\":\"completed\"", "\"status\":\"completed\",\"status\":\"queued\"").sealed(), "duplicate field"),
        ("an unknown row", good.clone().with(2, "{\"job\":{\"kind\":\"step\"}}").sealed(), "unknown variant"),
        ("a call that would run", good.clone().replace("call", "\"status\":\"done\"", "\"status\":\"started\"").sealed(), "has its result and is started"),
        ("a call that nobody asked for", good.clone().replace("call", "\"call_id\":\"call_g\"", "\"call_id\":\"call_h\"").sealed(), "was not asked for"),
        ("rules that are none", good.clone().replace("session", "\"policy\":{", "\"policy\":{\"tool_mode\":\"all\"").sealed(), "policy"),
        ("numbers that are counted on and overflow", { let mut far = good.clone(); for (at, key) in [(0, "\"message_number\":"), (good.at("session"), "\"last_message_number\":")] { far.0[at] = with_number(&far.0[at], key, i64::MAX) }; far.sealed() }, "beyond reason"),
        ("what a message cannot have cost", good.clone().replace("record", "\"input_tokens\":", "\"input_tokens\":30000000").sealed(), "has a usage that is negative or beyond reason"),
        ("what a message did not cost", good.clone().replace("record", "\"input_tokens\":", "\"input_tokens\":-").sealed(), "has a usage that is negative or beyond reason"),
        ("a time that there is not", good.clone().replace("event", "\"ts\":\"20", "\"ts\":\"99999-20").sealed(), "a time looks like"),
    ];
    assert!(cases.len() >= 20);
    let before = world.dump().await;
    let mut wrong = Vec::new();
    for (name, bytes, reason) in &cases {
        let (began, worked) = (Instant::now(), cpu());
        let refused = try_import(&world.store, bytes).await;
        // Take the smaller of wall time and CPU time: the machine or this process may be busy with other
        // tests.
        let took = began.elapsed().min(cpu() - worked);
        match refused {
            Err(Error::Bundle(refused)) if refused.to_string().contains(reason) => {}
            other => wrong.push(format!("{name}: {other:?}")),
        }
        if took > Duration::from_secs(1) {
            wrong.push(format!("{name}: {took:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(world.dump().await, before, "nothing was written");
    // The undamaged bundle is accepted, so the refusals above are due to the damage.
    try_import(&world.store, &bundle).await.unwrap();
}

/// Returns `line` with the first number after `key` replaced.
fn with_number(line: &str, key: &str, number: i64) -> String {
    let (before, after) = line.split_once(key).expect("the line has the key");
    let rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
    assert!(rest.len() < after.len(), "a number follows the key");
    format!("{before}{key}{number}{rest}")
}

/// CPU time that this process has used.
fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("below a second"))
}

#[tokio::test]
async fn a_call_without_a_result_that_says_it_settled_and_not_how_is_refused() {
    let world = World::new().await;
    let session_id = world.wake("c1", "Write to Bob.").await;
    let mut driver = world.drive(&session_id).await;
    driver.continues(Performed::Begun).await;
    driver.continues(replied(vec![asks(&call("call_p", "compose_email"))])).await;
    let good = Lines::of(&export(&world.store, &session_id).await);
    for status in ["done", "failed"] {
        let word = format!("\"status\":\"{status}\"");
        let made_up = good.clone().replace("call", "\"status\":\"invoked\"", &word).sealed();
        let refused = try_import(&world.store, &made_up).await.unwrap_err();
        assert!(refused.to_string().contains(&format!("is {status} without an outcome")), "{refused}");
    }
    try_import(&world.store, &good.sealed()).await.unwrap();
}

#[tokio::test]
async fn a_packed_file_that_unpacks_to_a_thousand_times_its_size_is_refused_as_a_bomb() {
    let world = World::new().await;
    let session_id = session(&world).await;
    let good = Lines::of(&export(&world.store, &session_id).await);
    // Valid seeds, all alike: each line is correct, and together they are large.
    let text = "x".repeat(1 << 20);
    let mut lines = good.0[..2].to_vec();
    lines[0] = lines[0].replacen("\"seeds\":1", "\"seeds\":6", 1);
    lines[1] = lines[1].replacen("\"seed_message_count\":1", "\"seed_message_count\":6", 1);
    for ordinal in 0..6 {
        lines.push(format!(
            "{{\"seed\":{{\"ordinal\":{ordinal},\"role\":\"user\",\"content\":\"{text}\",\"is_new\":true,\
             \"timestamp\":null,\"details\":null}}}}"
        ));
    }
    let refused = try_import(&world.store, &packed(lines.join("\n").as_bytes())).await.unwrap_err();
    assert!(refused.to_string().contains("times its size"), "{refused}");
}

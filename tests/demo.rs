//! `wakeful demo`, as a person runs it.

use crate::support::{Program, eventually};
use std::time::Instant;

fn demo(dir: &tempfile::TempDir) -> Program {
    let mut command = Program::command(dir.path());
    command.arg("demo");
    Program::start(command)
}

/// The ids of the processes that the timeline names.
fn named(program: &Program) -> Vec<i32> {
    let output = program.output();
    let after = output.lines().filter_map(|line| line.split_once("process ")?.1.split(' ').next());
    after.filter_map(|pid| pid.parse().ok()).collect()
}

fn lives(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[tokio::test]
async fn a_worker_is_killed_another_resumes_and_the_timeline_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let began = Instant::now();
    let mut program = demo(&dir);
    let status = program.end().await;
    let output = program.output();
    assert_eq!(status, 0, "{output}\n{}", program.errors());
    println!("{:?}\n{output}", began.elapsed());
    let at = |text: &str| {
        output.lines().position(|line| line.contains(text)).unwrap_or_else(|| panic!("no {text:?}: {output}"))
    };
    assert!(at("KILLED: kill -9") < at("RESUMES: worker A is dead"));
    assert!(at("RESUMES") < at("calls the model again"));
    assert!(at("calls the model again") < at("compose_email ok"));
    assert!(at("mail sent, 1 in the Maildir") < at("demo: passed"));
    assert!(!output.contains("BAD"), "{output}");
    assert!(!output.contains('\x1b'), "colours are for terminals");
    let pids = named(&program);
    assert_eq!(pids.len(), 3, "{output}");
    assert!(!pids.iter().any(|pid| lives(*pid)));
}

#[tokio::test]
async fn a_signal_ends_the_demo_and_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let mut program = demo(&dir);
    program.line("waits for work").await;
    let pids = named(&program);
    assert_eq!(pids.len(), 2);
    program.signal(libc::SIGINT);
    assert_eq!(program.end().await, 1);
    assert!(!pids.iter().any(|pid| lives(*pid)));
}

#[tokio::test]
async fn a_demo_that_is_killed_takes_its_processes_along() {
    let dir = tempfile::tempdir().unwrap();
    let mut program = demo(&dir);
    program.line("waits for work").await;
    let pids = named(&program);
    program.signal(libc::SIGKILL);
    assert_eq!(program.end().await, 128 + libc::SIGKILL);
    eventually("its processes to die", || async { (!pids.iter().any(|pid| lives(*pid))).then_some(()) })
        .await;
}

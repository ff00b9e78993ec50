//! What a process writes to a stream, line by line.

use std::io::{BufRead, BufReader, Read};
use std::thread::JoinHandle;
use tokio::sync::watch;

/// The text of one stream so far. A thread reads it until the stream ends.
pub struct Captured {
    text: watch::Receiver<String>,
    reader: Option<JoinHandle<()>>,
}

impl Captured {
    pub fn of(stream: impl Read + Send + 'static) -> Captured {
        let (writer, text) = watch::channel(String::new());
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                writer.send_modify(|text| {
                    text.push_str(&line);
                    text.push('\n');
                });
            }
        });
        Captured { text, reader: Some(reader) }
    }

    pub fn text(&self) -> String {
        self.text.borrow().clone()
    }

    /// Waits until a line contains `text`, and returns that line. `None`: the stream ended, or it took too long.
    pub async fn line(&self, text: &str) -> Option<String> {
        let mut written = self.text.clone();
        let mut seen = 0;
        let mut found = None;
        let waiting = written.wait_for(|so_far| {
            found = so_far[seen..].lines().find(|line| line.contains(text)).map(str::to_owned);
            seen = so_far.len();
            found.is_some()
        });
        // An error only says that the stream ended. What it wrote last has been searched.
        let _ = tokio::time::timeout(super::timeout(), waiting).await;
        found
    }

    /// Waits for the end of the stream.
    pub fn join(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.join().expect("no reader panics");
        }
    }
}

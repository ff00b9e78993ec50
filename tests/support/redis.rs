//! The part of Redis that the old cache needs. It reads entries, records commands, and refuses every write.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

pub struct Redis {
    pub url: String,
    entries: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    asked: Arc<Mutex<Vec<Vec<String>>>>,
    server: tokio::task::JoinHandle<()>,
}

impl Redis {
    #[expect(clippy::unused_async, reason = "tests start every kind of server with `.await`")]
    pub async fn start() -> Redis {
        let listener = super::servers::listen();
        let url = format!("redis://{}", listener.local_addr().expect("an address"));
        let (entries, asked) = (Arc::default(), Arc::default());
        let shared = (Arc::clone(&entries), Arc::clone(&asked));
        let server = super::servers::runtime().spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (entries, asked) = shared.clone();
                tokio::spawn(async move { serve(stream, &entries, &asked).await });
            }
        });
        Redis { url, entries, asked, server }
    }

    pub fn put(&self, key: &str, value: impl Into<Vec<u8>>) {
        self.entries.lock().expect("nobody panics").insert(key.to_owned(), value.into());
    }

    /// The commands about entries received so far, each with its arguments.
    pub fn asked(&self) -> Vec<Vec<String>> {
        self.asked.lock().expect("nobody panics").clone()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(
    stream: TcpStream,
    entries: &Mutex<BTreeMap<String, Vec<u8>>>,
    asked: &Mutex<Vec<Vec<String>>>,
) -> Option<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let count = line(&mut stream, '*').await?;
        let mut command = Vec::new();
        for _ in 0..count {
            let mut bytes = vec![0; line(&mut stream, '$').await? + 2];
            stream.read_exact(&mut bytes).await.ok()?;
            bytes.truncate(bytes.len() - 2);
            command.push(String::from_utf8(bytes).ok()?);
        }
        let answer = match command[0].to_uppercase().as_str() {
            // The client sends its name and library. It sends them to real servers too.
            "CLIENT" => b"+OK\r\n".to_vec(),
            "GETRANGE" => {
                asked.lock().expect("nobody panics").push(command.clone());
                let entry = entries.lock().expect("nobody panics").get(&command[1]).cloned();
                let mut entry = entry.unwrap_or_default();
                entry.truncate(command[3].parse::<usize>().ok()? + 1);
                [format!("${}\r\n", entry.len()).as_bytes(), &entry, b"\r\n"].concat()
            }
            other => {
                asked.lock().expect("nobody panics").push(command.clone());
                format!("-ERR {other} is none of this cache's business\r\n").into_bytes()
            }
        };
        stream.get_mut().write_all(&answer).await.ok()?;
    }
}

/// The number in a line that begins with `sign`.
async fn line(stream: &mut BufReader<TcpStream>, sign: char) -> Option<usize> {
    let mut line = String::new();
    stream.read_line(&mut line).await.ok()?;
    line.trim_end().strip_prefix(sign)?.parse().ok()
}

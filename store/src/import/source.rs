//! Reads the file of a bundle, plain or gzip, line by line. Holds at most one line in memory.

use crate::{Error, Result};
use flate2::bufread::MultiGzDecoder;
use std::cell::Cell;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::Path;
use std::rc::Rc;
use wakeful_workflow::bundle::{Checker, Limits};

/// The first bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// A gzip file that unpacks to more than this, and to more than [`BOMB_RATIO`] times its own size, is a bomb.
/// One line repeated many times compresses about a thousandfold, texts of agents about tenfold.
const BOMB_BYTES: u64 = 4 << 20;
const BOMB_RATIO: u64 = 500;

pub(super) struct Source<'f> {
    file: &'f Path,
    limits: Limits,
    input: Box<dyn BufRead>,
    packed: bool,
    /// Bytes of the file that were read so far.
    read: Rc<Cell<u64>>,
    unpacked: u64,
    line: Vec<u8>,
}

/// Counts the bytes that are read from a file.
struct Counted(File, Rc<Cell<u64>>);

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let read = self.0.read(into)?;
        self.1.set(self.1.get() + read as u64);
        Ok(read)
    }
}

impl<'f> Source<'f> {
    pub fn open(file: &'f Path, limits: Limits) -> Result<Source<'f>> {
        let read = Rc::new(Cell::new(0));
        let opened = File::open(file).map_err(|error| failed(file, error))?;
        let mut input = BufReader::with_capacity(1 << 16, Counted(opened, Rc::clone(&read)));
        let packed = input.fill_buf().map_err(|error| failed(file, error))?.starts_with(&GZIP);
        let input: Box<dyn BufRead> = if packed {
            Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(input)))
        } else {
            Box::new(input)
        };
        Ok(Source { file, limits, input, packed, read, unpacked: 0, line: Vec::new() })
    }

    /// Bytes of the file that were read so far.
    pub fn read(&self) -> u64 {
        self.read.get()
    }

    /// The next line without its newline. `checker` knows the line number for a refusal.
    pub fn line(&mut self, checker: &Checker) -> Result<Option<&[u8]>> {
        self.line.clear();
        // Read more than the limit, so that a line that is too long is noticed.
        let most = self.limits.line_bytes as u64 + 2;
        let read = (&mut self.input).take(most).read_until(b'\n', &mut self.line);
        match read {
            Ok(0) => return Ok(None),
            Ok(read) => self.unpacked += read as u64,
            Err(error) if self.packed && is_damage(&error) => {
                return Err(checker.next_refused(format!("the packed file is damaged: {error}")).into());
            }
            Err(error) => return Err(failed(self.file, error)),
        }
        if self.packed && self.unpacked > BOMB_BYTES && self.unpacked / BOMB_RATIO > self.read.get() {
            let reason = format!("it unpacks to more than {BOMB_RATIO} times its size");
            return Err(checker.next_refused(reason).into());
        }
        if self.line.pop() != Some(b'\n') {
            let reason = match self.line.len() >= self.limits.line_bytes {
                true => format!("it is longer than {} bytes", self.limits.line_bytes),
                false => "it is cut off: the line has no end".to_owned(),
            };
            return Err(checker.next_refused(reason).into());
        }
        Ok(Some(&self.line))
    }
}

fn is_damage(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::InvalidData | ErrorKind::UnexpectedEof)
}

pub(super) fn failed(file: &Path, source: std::io::Error) -> Error {
    let path = file.display().to_string();
    if source.kind() == ErrorKind::NotFound {
        Error::NotFound { what: "file", id: path }
    } else {
        Error::File { path, source }
    }
}

//! Progress of an export or an import in bytes.

use crate::command::meter::{Meter, style};
use std::sync::Arc;

#[derive(Clone)]
pub(super) struct Progress {
    what: &'static str,
    meter: Arc<Meter>,
}

impl Progress {
    /// Starts a progress display in bytes, with the total if it is known.
    pub fn of_bytes(what: &'static str, total: Option<u64>) -> Progress {
        let template = match total {
            Some(_) => "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}",
            None => "{msg} {spinner} {bytes} {bytes_per_sec}",
        };
        let meter = Meter::new(total, style(template));
        if let Some(bar) = meter.bar() {
            bar.set_message(what);
        }
        Progress { what, meter: Arc::new(meter) }
    }

    /// Reports the number of bytes done so far.
    pub fn at(&self, bytes: u64) {
        self.meter.at(bytes, || format!("{}: {bytes} bytes", self.what));
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.meter.end();
    }
}

//! Leaving Absurd: reads its tables, writes sessions, parks tasks there and gives them back.
//!
//! Two databases are involved, or two schemas of one, and no transaction spans both. So exactly one side may run a task at
//! each moment, and a crash between two commits leaves it with none, never with both:
//!
//! | | first commit | second commit |
//! |---|---|---|
//! | `take` | Absurd: the run is parked, so no worker can claim it | here: the session, its job, and its row of `absurd_imports` |
//! | `back` | here: the job is gone, the session is terminated, the row is `returning`; or such a row for a parked task without a session | Absurd: the run is as it was; then the row is `returned` |
//!
//! After a crash, the same command goes on where it stopped: parked tasks without a session are imported, `returning` ones
//! are given back. Each side's decision is one condition on its own row: in Absurd the run's `state` and `claimed_by`, here
//! the job's `lease` and the journal's last number.
//!
//! The unique key of `absurd_imports` (space, `absurd:QUEUE`, task) is inserted first in the transaction that writes the
//! session. A second import of the same task waits there, and then finds that it has nothing to do. So does a `back` of a task
//! that never became a session. The one that inserted the row reads the task again, because the other may have been before it.

mod back;
mod figures;
mod import;
mod known;
mod look;
mod park;
mod source;
mod verify;
mod version;
mod writing;

pub use back::{GivenBack, Held};
pub use figures::Gained;
pub use import::{Import, Imported, Outcome};
pub use known::ImportRow;
pub use look::Looked;
pub use park::{Parked, Unparked};
pub use source::{Count, Found, May, Queue, Source, Wanted, batches};
pub use verify::{Compared, Comparison};

//! A session's files on this host: restored when a tool asks, and stored when a step has changed them.
//!
//! Each step that changed the workspace leaves a snapshot. Its packs are put into the blob store first, and then the
//! step's commit names them, under its lease's fence. So each pack that a row names is there, and a pack that no row
//! names belongs to a commit that was never made; `wakeful blobs gc` collects it.
//!
//! A folder is only a copy of a snapshot. The first call of a turn that uses files compares the folder with the snapshot
//! that the session's rows name. If they differ (another worker went on, or a step died half-way), the folder is made
//! anew. So a turn that was not committed leaves no file, and its calls run again on the files that they began with.
//!
//! A claim holds a lock on the folder. The lock is given back when the claim and the last thread of its calls have ended,
//! so a worker that has lost its lease and does not know it yet keeps its folder to itself; the next claim makes another
//! one beside it.
#![doc = include_str!("README.md")]

mod browse;
mod codec;
mod folder;
mod git;
mod index;
mod lock;
mod look;
mod pack;
mod parts;
mod restore;
mod seed;
mod settings;
mod snapshot;
mod sweep;
mod tree;

pub use browse::{Changed, Files, Found, Listed, changes, checkout, list_at};
pub use folder::Held;
pub use git::Git;
pub use look::Limits;
pub use restore::Unreadable;
pub use seed::Seed;
pub use settings::{FileUse, Settings};
pub use sweep::remove_session;

pub(crate) use folder::is_of_host;
use folder::{State, of_host};
use look::Fault;
use restore::Bounds;
use seed::NotPlanted;
use snapshot::Made;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use tokio::sync::mpsc;
use tracing::{debug, warn};
use wakeful_store::Store;
use wakeful_workflow::session::Session;
use wakeful_workflow::workspace::Snapshot;

/// Packs that wait for the store while the next one is filled.
const PACKS_WAITING: usize = 1;

/// The workspaces that this process's claims use.
#[derive(Debug)]
pub struct Workspaces {
    settings: Arc<Settings>,
    git: Option<Git>,
    held: Mutex<HashMap<String, Arc<Held>>>,
    swept: Mutex<Option<Instant>>,
}

/// Why a workspace is not ready, or not stored.
#[derive(Debug)]
pub enum NotReady {
    /// The blob store is away. The step is tried again.
    Store(wakeful_store::Error),
    /// The URL that the files begin with does not answer: the host, and what it did. The step is tried again.
    SeedAway(String),
    /// This host cannot keep the files now: its disk is full, for one. Another worker's host may. The step is tried again.
    Host(String),
    /// It is not possible. The model gets this text.
    Refused(String),
}

impl Workspaces {
    /// Creates a process's view.
    pub fn new(settings: Settings) -> Workspaces {
        let (held, swept) = (Mutex::default(), Mutex::default());
        Workspaces { settings: Arc::new(settings), git: Git::find(), held, swept }
    }

    /// Whether this host has git.
    pub fn has_git(&self) -> bool {
        self.git.is_some()
    }

    /// Brings the folder of `session` to the snapshot that its rows name, for the claim `lease`. A session without files
    /// begins with a copy of `seed`. Returns whether it did so just now: a snapshot has to follow.
    ///
    /// # Errors
    /// [`NotReady`].
    pub async fn ready(
        &self,
        store: &Store,
        session: &Session,
        lease: i64,
        seed: Option<Seed<'_>>,
    ) -> Result<(Arc<Held>, bool), NotReady> {
        let held = self.hold(session.session_id.as_str(), lease).await?;
        let mut state = held.state.lock().await;
        let target = session.workspace.as_ref();
        if !state.is(target) {
            self.bring(store, &held, &mut state, target).await?;
        }
        let mut seeded = false;
        if let Some(seed) = seed
            && target.is_none()
            && !session.has_files()
            && !held.path.exists()
        {
            let planted = seed.plant(&held, self.git.as_ref(), &self.settings.limits).await;
            let index = planted.map_err(|why| not_planted(store, &held.session_id, why))?;
            (state.index, state.clean, seeded) = (Some(index), false, true);
        }
        drop(state);
        Ok((held, seeded))
    }

    /// Notes that a call is about to change the files, and makes the folder of a session that has none yet.
    ///
    /// # Errors
    /// [`NotReady`].
    pub async fn will_change(&self, session: &Session, held: &Arc<Held>) -> Result<(), NotReady> {
        let mut state = held.state.lock().await;
        if session.workspace.is_none() && !session.has_files() && !held.path.exists() {
            let on_host = Arc::clone(held);
            state.index = Some(blocking(move || on_host.make_empty()).await?);
        }
        state.clean = false;
        Ok(())
    }

    /// Leaves the folder to a call that may still write in it. The claim takes another folder when a tool next asks for files.
    pub fn leave(&self, left: &Arc<Held>) {
        let mut held = self.lock_held();
        if held.get(&left.session_id).is_some_and(|one| Arc::ptr_eq(one, left)) {
            held.remove(&left.session_id);
        }
    }

    /// The claim's folder, with its lock.
    async fn hold(&self, session_id: &str, lease: i64) -> Result<Arc<Held>, NotReady> {
        let known = self.lock_held().get(session_id).filter(|held| held.lease == lease).map(Arc::clone);
        if let Some(known) = known {
            return Ok(known);
        }
        // An earlier claim of this process may still be listed. Its lock goes with the last thread of its calls.
        self.lock_held().remove(session_id);
        let (settings, id) = (Arc::clone(&self.settings), session_id.to_owned());
        let held = Arc::new(blocking(move || Held::take(&settings, &id, lease)).await?);
        self.lock_held().insert(session_id.to_owned(), Arc::clone(&held));
        Ok(held)
    }

    fn lock_held(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<Held>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the folder what `target` says.
    async fn bring(
        &self,
        store: &Store,
        held: &Arc<Held>,
        state: &mut State,
        target: Option<&Snapshot>,
    ) -> Result<(), NotReady> {
        let (on_host, limits) = (Arc::clone(held), self.settings.limits.clone());
        let (index, wanted) = (state.index.take(), target.cloned());
        let warm = blocking(move || on_host.compare(index, wanted.as_ref(), &limits)).await?;
        if let Some(warm) = warm {
            (state.index, state.clean) = (warm, true);
            return Ok(());
        }
        let Some(target) = target else {
            let on_host = Arc::clone(held);
            blocking(move || on_host.remove()).await?;
            (state.index, state.clean) = (None, true);
            return Ok(());
        };
        let started = Instant::now();
        let tree =
            folder::hash_of_hex(&target.tree_sha256).ok_or_else(|| unreadable("its name is not a hash"))?;
        let bounds = Bounds::of(&self.settings.limits, target);
        let spool = restore::spool(store, &held.session_id, target, &held.state_folder(), &bounds).await;
        let spool = match spool {
            Ok(spool) => spool,
            Err(error) => return Err(not_restored(store, &held.session_id, error)),
        };
        let on_host = Arc::clone(held);
        let restored = tokio::task::spawn_blocking(move || on_host.restore(&spool, tree, &bounds)).await;
        let restored = restored.map_err(|error| unreadable(&error.to_string()))?;
        let index = restored.map_err(|error| not_restored(store, &held.session_id, error))?;
        debug!(session.id = held.session_id, files = target.files, bytes = target.bytes, elapsed = ?started.elapsed(),
            "Restored the workspace");
        (state.index, state.clean) = (Some(index), true);
        Ok(())
    }

    /// Stores what the calls of a turn have changed, and returns the snapshot for the turn's commit. `None`: nothing has
    /// changed.
    ///
    /// # Errors
    /// [`NotReady`]. The folder is made anew before it is used again.
    pub async fn snapshot(
        &self,
        store: &Store,
        session: &Session,
        held: &Arc<Held>,
    ) -> Result<Option<Snapshot>, NotReady> {
        let mut state = held.state.lock().await;
        let (sender, mut packs) = mpsc::channel(PACKS_WAITING);
        let (on_host, limits) = (Arc::clone(held), self.settings.limits.clone());
        let before = state.index.take();
        state.clean = false;
        let looking = tokio::task::spawn_blocking(move || on_host.look(before.as_ref(), &limits, &sender));
        while let Some(packed) = packs.recv().await {
            // Blob first, then the commit that names it.
            put(store, &held.session_id, &packed).await?;
            wakeful_store::failpoint!("K30_put");
        }
        let made = match looking.await {
            Ok(Ok(Some(made))) => made,
            Ok(Ok(None)) => return Ok(None),
            Ok(Err(fault)) => return Err(not_kept(store, &held.session_id, fault)),
            Err(error) => {
                return Err(NotReady::Refused(format!("The files could not be kept: {error}.")));
            }
        };
        let Made { index, files, bytes } = made;
        let tree_sha256 = hex::encode(index.tree);
        let before = session.workspace.as_ref().map(|snapshot| snapshot.tree_sha256.clone());
        let unchanged = tree_sha256 == before.unwrap_or_else(|| hex::encode(tree::nothing()));
        let packs = if unchanged { Vec::new() } else { index.packs.clone() };
        (state.index, state.clean) = (Some(index), true);
        if unchanged {
            return Ok(None);
        }
        held.save(state.index.as_ref());
        // The commit fills in its message.
        Ok(Some(Snapshot { tree_sha256, packs, files, bytes, message_number: 0 }))
    }

    /// Ends what a claim holds. Now and then, removes the files of sessions that have rested for long.
    pub fn release(&self, session_id: &str, lease: i64) {
        let released = {
            let mut held = self.lock_held();
            match held.get(session_id) {
                Some(one) if one.lease == lease => held.remove(session_id),
                _ => None,
            }
        };
        if released.is_some() {
            drop(released);
            self.sweep();
        }
    }

    fn sweep(&self) {
        let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
        if swept.is_some_and(|at| at.elapsed() < sweep::EVERY) {
            return;
        }
        *swept = Some(Instant::now());
        let settings = Arc::clone(&self.settings);
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(move || sweep::sweep(&settings));
        }
    }
}

async fn put(store: &Store, session_id: &str, packed: &pack::Packed) -> Result<(), NotReady> {
    store.put_pack(session_id, &hex::encode(packed.sha256), &packed.bytes).await.map_err(NotReady::Store)
}

// What these say may name files or quote them.

fn not_kept(store: &Store, session_id: &str, fault: Fault) -> NotReady {
    let said = fault.to_string();
    if let Fault::Io(error) = &fault
        && is_of_host(error)
    {
        return of_host(error);
    }
    warn!(
        session.id = session_id,
        fault = store.in_log(Some(session_id), &said),
        "The workspace was not stored"
    );
    NotReady::Refused(match fault {
        Fault::Refused(why) => why,
        Fault::Changed | Fault::Io(_) | Fault::GivenUp => format!("The files could not be kept: {fault}."),
    })
}

fn not_restored(store: &Store, session_id: &str, error: Unreadable) -> NotReady {
    let said = error.to_string();
    warn!(
        session.id = session_id,
        error = store.in_log(Some(session_id), &said),
        "The workspace was not restored"
    );
    match error {
        Unreadable::Store(error) if error.is_transient() => NotReady::Store(error),
        Unreadable::Io(error) if is_of_host(&error) => of_host(&error),
        error => unreadable(&error.to_string()),
    }
}

fn not_planted(store: &Store, session_id: &str, why: NotPlanted) -> NotReady {
    let why = match why {
        // The step waits, and says so at its gate.
        NotPlanted::Away(why) => return NotReady::SeedAway(why),
        NotPlanted::Host(error) => return of_host(&error),
        NotPlanted::Refused(why) => why,
    };
    let said = store.in_log(Some(session_id), &why);
    warn!(session.id = session_id, why = said, "A workspace did not get what it begins with");
    NotReady::Refused(format!(
        "The files that this agent's sessions begin with cannot be copied: {why}. Tell the user that the files cannot be \
         reached now."
    ))
}

fn unreadable(why: &str) -> NotReady {
    NotReady::Refused(format!(
        "The files of this session cannot be restored: {why}. Nothing was read or written. Tell the user that the files \
         cannot be reached now."
    ))
}

/// Runs `work` on a thread that may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, NotReady> + Send + 'static,
) -> Result<T, NotReady> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(NotReady::Refused(format!("The workspace could not be used: {error}."))),
    }
}

#[cfg(test)]
mod tests;

//! The session's files, as the calls of one turn use them.

use super::{ToolRun, failed};
use crate::perform::Unperformed;
use crate::tool::{FileUse, ToolError, Workspace};
use crate::workspace::{NotReady, Seed};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use wakeful_workflow::advance::{CallEnd, EndedCall};
use wakeful_workflow::files;
use wakeful_workflow::record::ToolCall;
use wakeful_workflow::workspace::Snapshot;

impl ToolRun<'_> {
    pub(super) fn file_use(&self, call: &ToolCall) -> FileUse {
        self.ctx.plugins.tools.get(&call.name).map_or(FileUse::None, |tool| tool.file_use())
    }

    /// Brings the session's files to this host, if the tool asks for them. Returns why that is not possible, in words for
    /// the model.
    pub(super) async fn bring_files(&self, call: &ToolCall) -> Result<Option<ToolError>, Unperformed> {
        let uses = self.file_use(call);
        if uses == FileUse::None {
            return Ok(None);
        }
        let (workspaces, lease) = (&self.ctx.workspaces, self.lease.token);
        let from = self.ctx.seed_of(self.session);
        let web = from.map(|_| self.ctx.web.under(&self.agent.web, self.session.policy.web.as_ref()));
        let seed = from.zip(web.as_ref()).map(|(from, web)| Seed { from, web });
        let ready = || async {
            // Else each call of the turn would wait for the same URL.
            if let Some(why) = self.seed_away.get() {
                return Err(NotReady::SeedAway(why.clone()));
            }
            let ready = workspaces.ready(&self.ctx.store, self.session, lease, seed).await;
            if let Err(NotReady::SeedAway(why)) = &ready {
                self.seed_away.get_or_init(|| why.clone());
            }
            let (files, seeded) = ready?;
            if seeded {
                self.may_have_changed.store(true, Ordering::Relaxed);
            }
            Ok(files)
        };
        let files = match self.files.get_or_try_init(ready).await {
            Ok(files) => files,
            Err(why) => return unready(why),
        };
        if uses == FileUse::Writes
            && !self.may_have_changed.swap(true, Ordering::Relaxed)
            && let Err(why) = workspaces.will_change(self.session, files).await
        {
            return unready(why);
        }
        Ok(None)
    }

    /// Stores what the turn's calls have changed. If that is refused, the files are put back, and the calls that may
    /// have changed them report it.
    pub(super) async fn store_files(
        &self,
        ended: &mut [(EndedCall, i64)],
    ) -> Result<Option<Snapshot>, Unperformed> {
        let (Some(files), true) = (self.files.get(), self.may_have_changed.load(Ordering::Relaxed)) else {
            return Ok(None);
        };
        match self.ctx.workspaces.snapshot(&self.ctx.store, self.session, files).await {
            Ok(snapshot) => Ok(snapshot),
            Err(NotReady::Store(error)) => Err(error.into()),
            Err(NotReady::SeedAway(why)) => Err(Unperformed::SeedAway(why)),
            Err(NotReady::Host(why)) => Err(Unperformed::Host(why)),
            Err(NotReady::Refused(error)) => {
                for (one, _) in
                    ended.iter_mut().filter(|(one, _)| self.file_use(&one.call) == FileUse::Writes)
                {
                    if let CallEnd::Settled(_, outcome) = &one.ending {
                        let said = &outcome.content;
                        one.ending = failed(format!(
                            "The files were put back as they were before this turn, because they could not be stored: \
                             {error} The call itself had said: {said}"
                        ));
                    }
                }
                Ok(None)
            }
        }
    }

    pub(super) fn workspace(&self) -> Workspace {
        let held = self.files.get().map(Arc::clone);
        let path = match &held {
            Some(held) => held.path.clone(),
            None => self.ctx.workspace_of(&self.session.session_id),
        };
        let expected = self.session.has_files();
        if !self.session.policy.tool_mode.is_live() {
            let files = if expected { files::files_of(&self.session.records) } else { Vec::new() };
            return Workspace { path, expected, inherited: None, rehearsed: Some(files.into()), _held: held };
        }
        // A fork of a session without snapshots takes its files out of the transcript once, while its folder does not
        // exist.
        let from_transcript = expected && self.session.workspace.is_none() && !path.exists();
        let inherited = if from_transcript { files::inherited(self.session) } else { None };
        Workspace { path, expected, inherited: inherited.map(Into::into), rehearsed: None, _held: held }
    }

    /// Notes that a call returned nothing. Its thread may still write.
    pub(super) fn note_lost(&self, call: &ToolCall) {
        if self.file_use(call) == FileUse::Writes {
            self.may_still_change.store(true, Ordering::Relaxed);
        }
    }

    /// Leaves the folder to a call that may still write in it. The next turn takes another one.
    pub(super) fn leave_files_to_lost_calls(&self) {
        if let (Some(files), true) = (self.files.get(), self.may_still_change.load(Ordering::Relaxed)) {
            self.ctx.workspaces.leave(files);
        }
    }
}

/// The words for the model, if no other try can help.
fn unready(why: NotReady) -> Result<Option<ToolError>, Unperformed> {
    match why {
        NotReady::Store(error) => Err(error.into()),
        NotReady::SeedAway(why) => Err(Unperformed::SeedAway(why)),
        NotReady::Host(why) => Err(Unperformed::Host(why)),
        NotReady::Refused(why) => Ok(Some(ToolError::new(why))),
    }
}

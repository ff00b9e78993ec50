//! This process's copy of the pauses. A step asks it before each model call and before its tools; without pauses that is one
//! look at an empty list, and no statement.

use crate::model::provider_of;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;
use tracing::info;
use wakeful_store::pause::Pause;
use wakeful_store::queue::Job;
use wakeful_store::{Result, Store};
use wakeful_workflow::pause::{Kind, Step, Subject};
use wakeful_workflow::session::Session;

/// How often to look while something is paused. A change of a pause is announced too.
pub const EVERY: Duration = Duration::from_millis(500);

/// What is paused.
#[derive(Debug, Default)]
pub struct Pauses(RwLock<Vec<(Subject, Pause)>>);

impl Pauses {
    /// Returns the pause that holds up this step, whose job has these passes.
    pub fn holding(&self, step: &Step<'_>, passes: &[i64]) -> Option<(Subject, String)> {
        self.find(passes, |subject| step.is_held_by(subject))
    }

    /// Returns the pause that holds up the messages of `channel`, whose job has these passes.
    pub fn holding_channel(&self, channel: &str, passes: &[i64]) -> Option<(Subject, String)> {
        self.find(passes, |subject| subject.kind == Kind::Channel && subject.name == channel)
    }

    fn find(&self, passes: &[i64], holds: impl Fn(&Subject) -> bool) -> Option<(Subject, String)> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let (subject, pause) =
            known.iter().find(|(subject, pause)| !passes.contains(&pause.number) && holds(subject))?;
        Some((subject.clone(), format!("{} is paused: {}", pause.what(), pause.reason)))
    }

    /// Returns whether a pause forbids the next call of `model`.
    pub fn forbids(&self, job: &Job, session: &Session, model: &str) -> bool {
        !self.none()
            && job.runner.is_empty()
            && self.holding(&step_of(session, Some(provider_of(model)), &[]), &job.pause_passes).is_some()
    }

    /// Returns whether nothing is paused.
    pub fn none(&self) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Reads the pauses, and lets jobs go whose pause has ended. Returns whether there are any to claim.
    ///
    /// # Errors
    /// When the database cannot be asked: what is known stays.
    pub async fn look(&self, store: &Store) -> Result<bool> {
        let pauses = store.known_pauses(0).await?;
        let some = !pauses.is_empty();
        let known: Vec<(Subject, Pause)> =
            pauses.into_iter().filter_map(|pause| Some((pause.subject()?, pause))).collect();
        let before = std::mem::replace(&mut *self.0.write().unwrap_or_else(PoisonError::into_inner), known);
        self.say(&before);
        Ok(some && store.tend_pauses().await? > 0)
    }

    /// Logs what has changed since `before`.
    fn say(&self, before: &[(Subject, Pause)]) {
        let now = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let ids =
            |pauses: &[(Subject, Pause)]| pauses.iter().map(|(subject, _)| subject.id()).collect::<Vec<_>>();
        if ids(before) != ids(&now) {
            info!("Paused now: {}", ids(&now).join(", "));
        }
    }
}

/// What a step does next, as pauses see it.
pub fn step_of<'a>(session: &'a Session, provider: Option<&'a str>, tools: &'a [&'a str]) -> Step<'a> {
    Step {
        space_id: &session.space_id,
        agent: &session.agent,
        trigger_type: &session.trigger_type,
        conversation_id: session.conversation_id.as_str(),
        provider,
        tools,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_goes_through_every_pause_that_has_let_it_go() {
        let pause = |kind: Kind, name: &str, number| {
            let subject = Subject::named(kind, Some(name), "default").unwrap();
            let pause = Pause {
                kind: kind.as_str().to_owned(),
                name: name.to_owned(),
                reason: "a fix".to_owned(),
                by: None,
                since: "2026-11-24T00:00:00Z".parse().unwrap(),
                until: None,
                resuming_since: None,
                rate: Some(1.0),
                waiting: 1,
                number,
            };
            (subject, pause)
        };
        let pauses =
            Pauses(RwLock::new(vec![pause(Kind::Agent, "support", 1), pause(Kind::Trigger, "chat", 2)]));
        let step = Step {
            space_id: "default",
            agent: "support",
            trigger_type: "chat",
            conversation_id: "default/c1",
            provider: None,
            tools: &[],
        };
        let holds = |passes: &[i64]| pauses.holding(&step, passes).map(|(subject, _)| subject.kind);
        assert_eq!(holds(&[]), Some(Kind::Agent));
        assert_eq!(holds(&[1]), Some(Kind::Trigger));
        assert_eq!(holds(&[2]), Some(Kind::Agent));
        assert_eq!(holds(&[1, 2]), None, "neither holds it a second time");
        assert_eq!(pauses.holding_channel("chat", &[]), None, "its kind is another");
    }
}

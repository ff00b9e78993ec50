//! What the requests of this process's sessions have in common with their next ones: see
//! [`wakeful_workflow::wire::Rendering`].

use super::Model;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use wakeful_workflow::context::Context;
use wakeful_workflow::id::SessionId;
use wakeful_workflow::wire::{Rendering, Repairs, Request};

/// Memory that the kept bytes may take.
const KEPT_BYTES: usize = 64 << 20;

/// The renderings that are kept, the one that was used last at the end. When they take more memory than they may,
/// the first ones are dropped: the next request of such a session is rendered from the start.
#[derive(Default)]
pub struct Renderings(Mutex<VecDeque<Kept>>);

struct Kept {
    session_id: SessionId,
    /// `provider/name`.
    model: String,
    rendering: Rendering,
}

/// A request that is about to be made, or only compared. When it is dropped, its rendering is kept.
pub struct Draft<'a> {
    renderings: &'a Renderings,
    session_id: &'a SessionId,
    name: &'a str,
    model: &'a dyn Model,
    context: &'a Context,
    /// `None` if the model renders each request itself.
    rendering: Option<Rendering>,
}

/// A request without its body.
pub struct Outline {
    pub sha256: String,
    pub repairs: Repairs,
    pub prefill: Option<String>,
}

impl Renderings {
    /// Renders the part of `context` that is new since the session's last request to the model called `name`.
    pub fn draft<'a>(
        &'a self,
        session_id: &'a SessionId,
        name: &'a str,
        model: &'a dyn Model,
        context: &'a Context,
    ) -> Draft<'a> {
        let rendering =
            model.protocol().map(|protocol| Rendering::of(protocol, context, self.take(session_id, name)));
        Draft { renderings: self, session_id, name, model, context, rendering }
    }

    fn take(&self, session_id: &SessionId, name: &str) -> Option<Rendering> {
        let mut kept = self.kept();
        let at = kept.iter().position(|one| one.session_id == *session_id && one.model == name)?;
        kept.remove(at).map(|one| one.rendering)
    }

    fn keep(&self, one: Kept) {
        let mut kept = self.kept();
        kept.retain(|other| other.session_id != one.session_id || other.model != one.model);
        kept.push_back(one);
        let mut bytes: usize = kept.iter().map(|one| one.rendering.bytes()).sum();
        while bytes > KEPT_BYTES
            && let Some(dropped) = kept.pop_front()
        {
            bytes -= dropped.rendering.bytes();
        }
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Draft<'_> {
    /// The request's body and all that belongs to it.
    pub fn request(&self, prefill: Option<&str>) -> Request {
        match &self.rendering {
            Some(rendering) => rendering.rendered(prefill).request(),
            None => self.whole(prefill),
        }
    }

    /// The request's hash, without its body.
    pub fn outline(&self, prefill: Option<&str>) -> Outline {
        match &self.rendering {
            Some(rendering) => {
                let rendered = rendering.rendered(prefill);
                Outline { sha256: rendered.sha256(), repairs: rendered.repairs, prefill: rendered.prefill }
            }
            None => {
                let request = self.whole(prefill);
                Outline { sha256: request.sha256(), repairs: request.repairs, prefill: request.prefill }
            }
        }
    }

    fn whole(&self, prefill: Option<&str>) -> Request {
        match prefill {
            Some(prefill) => {
                let context = Context { prefill: Some(prefill.to_owned()), ..self.context.clone() };
                self.model.request(&context)
            }
            None => self.model.request(self.context),
        }
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if let Some(rendering) = self.rendering.take() {
            let (session_id, model) = (self.session_id.clone(), self.name.to_owned());
            self.renderings.keep(Kept { session_id, model, rendering });
        }
    }
}

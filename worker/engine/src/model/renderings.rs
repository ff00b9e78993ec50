//! What the requests of this process's sessions have in common with their next ones: see
//! [`wakeful_workflow::wire::Rendering`].

use super::Model;
use crate::kept::Kept;
use wakeful_workflow::context::Context;
use wakeful_workflow::id::SessionId;
use wakeful_workflow::wire::{Rendering, Repairs, Request};

/// Memory that the renderings may take.
const KEPT_BYTES: usize = 64 << 20;

/// The rendering of each session's last request. When they take more memory than they may, those that were used the longest ago
/// are dropped: the next request of such a session is rendered from the start. A request to another model is too.
#[derive(Default)]
pub struct Renderings(Kept<Of>);

struct Of {
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
        let taken = self.0.take(session_id)?.value;
        (taken.model == name).then_some(taken.rendering)
    }

    fn keep(&self, session_id: SessionId, model: String, rendering: Rendering) {
        let bytes = rendering.bytes();
        self.0.put(session_id, bytes, Of { model, rendering }, KEPT_BYTES);
    }

    pub(crate) fn forget_old(&self) {
        self.0.forget_old();
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
            self.renderings.keep(self.session_id.clone(), self.name.to_owned(), rendering);
        }
    }
}

//! Guest resources that are held for a queue's interrupts: a pinned page and a registered subclass.

use core::mem;

use crate::command::Subclass;
use crate::outside::{GuestPage, HostAddress, HostSubclass, Pages, Subclasses};
use crate::status::Response;

/// A pinned page and a registered subclass. It is consumed by [`Registration::release`], the only
/// way to release them.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is not released stays pinned"]
pub(crate) struct Registration {
    page: GuestPage,
    subclass: Subclass,
}

impl Registration {
    /// Pins the page and registers the subclass, or neither. The error is the response code for the
    /// guest.
    pub(crate) fn take(
        pages: &mut impl Pages,
        subclasses: &mut impl Subclasses,
        page: GuestPage,
        subclass: Subclass,
    ) -> Result<(Registration, HostAddress, HostSubclass), Response> {
        let frame = pages.pin(page).map_err(|_| Response::INVALID_ADDRESS)?;
        match subclasses.register(subclass) {
            Ok(host) => Ok((Registration { page, subclass }, frame, host)),
            Err(_) => {
                pages.unpin(page);
                Err(Response::INVALID_GISA)
            }
        }
    }

    /// Releases both: the subclass first, so that no interrupt is announced for a released byte.
    pub(crate) fn release(self, pages: &mut impl Pages, subclasses: &mut impl Subclasses) {
        subclasses.unregister(self.subclass);
        pages.unpin(self.page);
    }

    pub(crate) fn page(&self) -> GuestPage {
        self.page
    }

    pub(crate) fn subclass(&self) -> Subclass {
        self.subclass
    }
}

/// Resources that are held for the interrupts of one queue.
#[derive(Debug, Default)]
pub(crate) enum InterruptResources {
    /// No resources are held.
    #[default]
    Nothing,
    /// Interrupts are on, or will be: the bit may still read zero.
    Active(Registration),
    /// Interrupts are being turned off.
    Leaving {
        registration: Registration,
        /// The queue has accepted the request, by AQIC or a reset. Before that, an interrupt bit of
        /// zero means nothing, because interrupts may still be about to be enabled.
        told: bool,
    },
}

/// State of one queue: the resources held for its interrupts, and whether it is being reset.
#[derive(Debug, Default)]
pub(crate) struct QueueRecord {
    /// Resources that are held for the queue's interrupts.
    pub(crate) held: InterruptResources,
    /// Whether a reset of the queue was started and has not been seen to end.
    pub(crate) resetting: bool,
}

impl QueueRecord {
    pub(crate) fn registration(&self) -> Option<&Registration> {
        match &self.held {
            InterruptResources::Nothing => None,
            InterruptResources::Active(registration)
            | InterruptResources::Leaving { registration, .. } => Some(registration),
        }
    }

    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.held, InterruptResources::Leaving { .. })
    }

    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.held, InterruptResources::Nothing) && !self.resetting
    }

    /// Begins to turn the queue's interrupts off; `now_told`: the queue has accepted the order.
    pub(crate) fn leave(&mut self, now_told: bool) {
        self.held = match mem::take(&mut self.held) {
            InterruptResources::Nothing => InterruptResources::Nothing,
            InterruptResources::Active(registration) => InterruptResources::Leaving {
                registration,
                told: now_told,
            },
            InterruptResources::Leaving { registration, told } => InterruptResources::Leaving {
                registration,
                told: told || now_told,
            },
        };
    }

    /// Releases the resources for interrupts, after the queue has stopped using them.
    pub(crate) fn release(&mut self, pages: &mut impl Pages, subclasses: &mut impl Subclasses) {
        match mem::take(&mut self.held) {
            InterruptResources::Nothing => {}
            InterruptResources::Active(registration)
            | InterruptResources::Leaving { registration, .. } => {
                registration.release(pages, subclasses);
            }
        }
    }
}

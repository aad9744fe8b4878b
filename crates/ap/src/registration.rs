//! A queue's hold on the guest: one pinned page and one registered subclass, and how
//! far it is on its way out.

use core::mem;

use crate::command::Subclass;
use crate::outside::{GuestPage, HostAddress, HostSubclass, Pages, Subclasses};
use crate::status::Response;

/// One pin and one registration. It is consumed by [`Registration::release`]; there is no
/// other way to give them back.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is not released stays pinned"]
pub(crate) struct Registration {
    page: GuestPage,
    subclass: Subclass,
}

impl Registration {
    /// Pins the page and registers the subclass, both or neither. The error is the
    /// response code for the guest.
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

    /// Gives both back: the subclass first, so that no interrupt is
    /// announced for a byte that is gone.
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

/// What a queue's interrupts hold.
#[derive(Debug, Default)]
pub(crate) enum Held {
    /// Nothing.
    #[default]
    Nothing,
    /// Interrupts are on, or were accepted to be: the bit may still read zero.
    Active(Registration),
    /// They are to go off.
    Leaving {
        registration: Registration,
        /// The queue was told so, by AQIC or by a reset, and accepted. Before that an interrupt bit
        /// of zero means nothing: interrupts may still be on their way in.
        told: bool,
    },
}

/// What is kept for a queue.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// What its interrupts hold.
    pub(crate) held: Held,
    /// A reset was begun and has not been seen to end.
    pub(crate) resetting: bool,
}

impl Kept {
    pub(crate) fn registration(&self) -> Option<&Registration> {
        match &self.held {
            Held::Nothing => None,
            Held::Active(registration) | Held::Leaving { registration, .. } => Some(registration),
        }
    }

    pub(crate) fn is_leaving(&self) -> bool {
        matches!(self.held, Held::Leaving { .. })
    }

    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.held, Held::Nothing) && !self.resetting
    }

    /// Interrupts are to go off; `told` if the queue has accepted that.
    pub(crate) fn leave(&mut self, now_told: bool) {
        self.held = match mem::take(&mut self.held) {
            Held::Nothing => Held::Nothing,
            Held::Active(registration) => Held::Leaving {
                registration,
                told: now_told,
            },
            Held::Leaving { registration, told } => Held::Leaving {
                registration,
                told: told || now_told,
            },
        };
    }

    /// Releases what is held; the queue does not use it any more.
    pub(crate) fn release(&mut self, pages: &mut impl Pages, subclasses: &mut impl Subclasses) {
        match mem::take(&mut self.held) {
            Held::Nothing => {}
            Held::Active(registration) | Held::Leaving { registration, .. } => {
                registration.release(pages, subclasses);
            }
        }
    }
}

//! A queue's hold on the guest: one pinned page and one registered subclass.

use crate::command::Subclass;
use crate::outside::{GuestPage, HostAddress, HostSubclass, Pages, Subclasses};
use crate::status::Response;

/// One pin and one registration. It is consumed by [`Registration::release`]; there is no other way to give them back.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is not released stays pinned"]
pub(crate) struct Registration {
    page: GuestPage,
    subclass: Subclass,
}

impl Registration {
    /// Pins the page and registers the subclass, both or neither. The error is the response code for the guest.
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

    /// Gives both back: the subclass first, so that no interrupt is announced for a byte that is gone.
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

//! Interrupt calls of the client.

use std::os::fd::BorrowedFd;

use zerocopy::IntoBytes;

use super::{Client, ClientError};
use crate::device::IrqAction;
use crate::wire::{self, Command};

/// Interrupts that a client's request selects, or eventfds to assign to them.
#[derive(Clone, Copy, Debug)]
pub enum Irqs<'a> {
    /// The given number of interrupts, from the first one on.
    All(u32),
    /// The interrupts with the value `true`.
    Chosen(&'a [bool]),
    /// Eventfd for each interrupt; `None` removes the eventfd.
    Eventfds(&'a [Option<BorrowedFd<'a>>]),
}

impl Client {
    /// Assigns, masks, unmasks or triggers interrupts from `start` on.
    ///
    /// Eventfds are sent in as many messages as the server needs: at most its `max_msg_fds` in
    /// each, and never interrupts with an eventfd together with such without.
    pub fn set_irqs(
        &mut self,
        index: u32,
        start: u32,
        action: IrqAction,
        irqs: Irqs<'_>,
    ) -> Result<(), ClientError> {
        use wire::irq_set as set;

        let action = match action {
            IrqAction::Mask => set::ACTION_MASK,
            IrqAction::Unmask => set::ACTION_UNMASK,
            IrqAction::Trigger => set::ACTION_TRIGGER,
        };
        let head = wire::IrqSet {
            argsz: size_of::<wire::IrqSet>() as u32,
            flags: action,
            index,
            start,
            count: 0,
        };
        match irqs {
            Irqs::All(count) => {
                let request = wire::IrqSet {
                    flags: action | set::DATA_NONE,
                    count,
                    ..head
                };
                self.set_some_irqs(request, &[], &[])
            }
            Irqs::Chosen(chosen) => {
                let bytes: Vec<u8> = chosen.iter().map(|chosen| u8::from(*chosen)).collect();
                let count = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
                let argsz = head.argsz.saturating_add(count);
                let request = wire::IrqSet {
                    argsz,
                    flags: action | set::DATA_BOOL,
                    count,
                    ..head
                };
                self.set_some_irqs(request, &bytes, &[])
            }
            Irqs::Eventfds(eventfds) => {
                let limit = usize::try_from(self.server.max_msg_fds)
                    .unwrap_or(usize::MAX)
                    .clamp(1, wire::MAX_MSG_FDS);
                let mut start = start;
                for alike in eventfds.chunk_by(|a, b| a.is_some() == b.is_some()) {
                    for chunk in alike.chunks(limit) {
                        let fds: Vec<BorrowedFd<'_>> = chunk.iter().flatten().copied().collect();
                        let count = u32::try_from(chunk.len()).unwrap_or(u32::MAX);
                        let request = wire::IrqSet {
                            flags: action | set::DATA_EVENTFD,
                            start,
                            count,
                            ..head
                        };
                        self.set_some_irqs(request, &[], &fds)?;
                        start = start.saturating_add(count);
                    }
                }
                Ok(())
            }
        }
    }

    fn set_some_irqs(
        &mut self,
        head: wire::IrqSet,
        data: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), ClientError> {
        let fds = self.call(Command::DEVICE_SET_IRQS, &[head.as_bytes(), data], fds)?;
        self.no_fds(&fds)
    }
}

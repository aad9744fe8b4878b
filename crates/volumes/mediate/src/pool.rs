//! Physical queue pairs for the virtual ones of one worker: one for each, or shared when the device
//! has too few.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use driver::{Device, Error};

use crate::lane::Lane;
use crate::options::DirectOptions;
use crate::queue::DirectQueue;

/// Physical queue pairs of a device that one worker has taken. Unused ones are released.
#[derive(Debug)]
pub struct QueuePairPool {
    device: Device,
    lanes: Vec<Weak<RefCell<Lane>>>,
}

impl QueuePairPool {
    /// Creates a pool of the device's queue pairs, without opening any.
    pub fn new(device: Device) -> Self {
        Self {
            device,
            lanes: Vec::new(),
        }
    }

    /// Returns the device to which the queue pairs belong.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Creates a virtual queue pair: on a physical queue pair of its own, or, if none is left, on
    /// the one of this worker with the fewest users.
    ///
    /// # Errors
    /// [`Error::NoQueue`] when other workers use all queue pairs; otherwise the error of the
    /// driver.
    pub fn queue(&mut self, options: DirectOptions) -> Result<DirectQueue, Error> {
        self.lanes.retain(|lane| lane.strong_count() > 0);
        match DirectQueue::reserve(&self.device, options) {
            Ok(queue) => {
                self.lanes.push(Rc::downgrade(queue.lane()));
                Ok(queue)
            }
            Err(Error::NoQueue { allowed }) => {
                let lanes = self.lanes.iter().filter_map(Weak::upgrade);
                let users = |lane: &Rc<RefCell<Lane>>| {
                    lane.try_borrow().map_or(usize::MAX, |lane| lane.users())
                };
                let lane = lanes.min_by_key(users).ok_or(Error::NoQueue { allowed })?;
                DirectQueue::on(lane, options)
            }
            Err(error) => Err(error),
        }
    }
}

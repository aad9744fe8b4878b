//! Physical queue pairs for the virtual ones of one worker: one each, or shared
//! when the device has too few.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use driver::{Device, Error};

use crate::lane::Lane;
use crate::options::DirectOptions;
use crate::queue::DirectQueue;

/// The physical queue pairs of one device that one worker has taken. They are
/// released when nobody uses them.
#[derive(Debug)]
pub struct Pool {
    device: Device,
    lanes: Vec<Weak<RefCell<Lane>>>,
}

impl Pool {
    /// None taken yet.
    pub fn new(device: Device) -> Self {
        Self {
            device,
            lanes: Vec::new(),
        }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A way to the device: by a physical queue pair of its own, or, if there is none left, by that
    /// of this worker's which has the fewest users.
    ///
    /// # Errors
    /// [`Error`]; [`Error::NoQueue`] when other workers have all of them.
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

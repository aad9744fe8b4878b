//! Interface between a worker and the command sources that it serves.

use std::time::Instant;
use volume::{Budget, Completion, PinPace};

/// A source of commands, as a [`Worker`](crate::Worker) sees it: an NVMe controller behind a
/// socket, queues of another worker's controller, a vhost-user-blk export, a queue of a ublk disk,
/// a controller inside this process.
///
/// All calls come from the worker's thread. None of them may block. One call of [`Frontend::poll`]
/// does the work of its budget; [`Frontend::ready`] and [`Frontend::read_on`] handle a few
/// messages. The worker reads the time after each call, so that a flood at one front-end does not
/// starve another.
///
/// A program with several kinds of front-end makes an enum of them
/// ([`frontend_enum!`](crate::frontend_enum)). No call on a command's path is virtual then.
pub trait Frontend {
    /// Error with which closing the front-end can fail ([`Frontend::close`]).
    type Error: std::error::Error + 'static;

    /// Fetches new commands and starts them, as far as the budget allows; completes commands that
    /// need no volume. Returns `true` when there was work. `now` is a few rounds old at most.
    fn poll(&mut self, now: Instant, budget: &mut Budget) -> bool;

    /// Handles a completed request. The upper 16 bits of its tag are this front-end's
    /// [`Context::owner`](crate::Context::owner).
    fn complete(&mut self, completion: Completion);

    /// Appends to `out` the completions of volumes that do not use the worker's ring.
    fn poll_volumes(&mut self, out: &mut Vec<Completion>) {
        let _ = out;
    }

    /// Ends a round after all completions are in: publishes completions to the guest and answers
    /// deferred messages. Returns `true` when there was work.
    fn finish_round(&mut self) -> bool {
        false
    }

    /// Checks the most urgent sources between two rounds. Returns `true` when [`Frontend::poll`]
    /// would find work. May miss events, because a round follows soon.
    #[inline]
    fn has_news(&self) -> bool {
        false
    }

    /// Returns the number of requests outstanding at volumes, through the ring or otherwise.
    fn in_flight(&self) -> usize;

    /// Returns whether the thread must not sleep, because commands or completions arrive without a
    /// wake-up.
    fn must_poll(&self) -> bool {
        false
    }

    /// Returns whether commands arrive without a wake-up (the client writes doorbells in shared
    /// memory), so that the front-end is polled at intervals while it is idle.
    fn is_unannounced(&self) -> bool {
        false
    }

    /// Returns whether polling for a while after the last work may spare a wake-up. That holds when
    /// the guest submits by memory, or has commands in flight.
    fn keeps_window(&self) -> bool {
        self.in_flight() > 0
    }

    /// Returns whether unread data is left on the socket; [`Frontend::read_on`] continues with it.
    fn has_more(&self) -> bool {
        false
    }

    /// Returns whether the guest announces commands by socket messages, so that sockets are polled
    /// often.
    fn is_trapped(&self) -> bool {
        false
    }

    /// Asks the guest for a notification of its next command (EventIdx, `avail_event`): store, full
    /// fence, then another check. Returns `true` when a command arrived meanwhile.
    fn arm(&mut self) -> bool;

    /// Returns whether the host may lack the full barrier between publishing a command and reading
    /// EventIdx. After [`Frontend::arm`] the worker then checks again for a few microseconds.
    fn needs_recheck(&self) -> bool {
        false
    }

    /// Checks once more before sleep, see [`Frontend::needs_recheck`]. Returns `true` when a
    /// command arrived.
    fn recheck(&mut self) -> bool {
        false
    }

    /// Returns when the front-end is to be polled even without a wake-up.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Reads the channels that other threads write to, after the worker's wake flag was raised.
    /// Returns `true` when there was a message.
    fn drain_messages(&mut self) -> bool {
        false
    }

    /// Lets the queues of the volumes take over settings that were changed
    /// (`volume::OpenQueue::update`). The program calls this by a job after such a change.
    fn update_volumes(&mut self) {}

    /// Does work that is not urgent. Called periodically while the thread is awake (100 us or more
    /// between two calls), and after each sleep.
    fn housekeeping(&mut self, now: Instant) {
        let _ = now;
    }

    /// Returns whether guest memory waits to be pinned (fixed buffers), so that [`Frontend::pin`]
    /// is to be called.
    fn is_pinning(&self) -> bool {
        false
    }

    /// Pins a piece of guest memory. The worker's front-ends share one `pace`, which keeps the
    /// pieces short.
    fn pin(&mut self, pace: &mut PinPace) {
        let _ = pace;
    }

    /// Handles a ready descriptor that the front-end put into the epoll set under this token.
    fn ready(&mut self, token: u32) {
        let _ = token;
    }

    /// Continues to read the socket, see [`Frontend::has_more`].
    fn read_on(&mut self) {}

    /// Begins the worker's end: fetches nothing more, completes outstanding requests, and makes all
    /// data durable. Rounds continue until [`Frontend::is_drained`].
    fn flush(&mut self);

    /// Returns whether no request and no flush is outstanding.
    fn is_drained(&self) -> bool;

    /// Closes the client's connection after all data is durable.
    ///
    /// # Errors
    /// For example the error that kept data from becoming durable.
    fn close(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Returns whether the front-end has ended by itself; the worker then removes it.
    fn has_ended(&self) -> bool {
        false
    }
}

/// Implements [`Frontend`] for an enum, each of whose variants contains one front-end: every call
/// is a `match`. An error of a front-end's end is converted into the enum's error.
///
/// ```
/// # struct Disk;
/// # struct Listener;
/// # use std::{convert::Infallible, time::Instant};
/// # use volume::{Budget, Completion};
/// # macro_rules! front { ($name:ident) => {
/// #     impl worker::Frontend for $name {
/// #         type Error = Infallible;
/// #         fn poll(&mut self, _: Instant, _: &mut Budget) -> bool { false }
/// #         fn complete(&mut self, _: Completion) {}
/// #         fn in_flight(&self) -> usize { 0 }
/// #         fn arm(&mut self) -> bool { false }
/// #         fn flush(&mut self) {}
/// #         fn is_drained(&self) -> bool { true }
/// #     }
/// # } }
/// # front!(Disk);
/// # front!(Listener);
/// enum Front {
///     Disk(Disk),
///     Listener(Listener),
/// }
/// worker::frontend_enum! { Front, Infallible: Disk, Listener }
/// ```
#[macro_export]
macro_rules! frontend_enum {
    ($name:ty, $error:ty: $($variant:ident),+ $(,)?) => {
        impl $crate::Frontend for $name {
            type Error = $error;

            fn close(&mut self) -> Result<(), Self::Error> {
                match self {
                    $(Self::$variant(front) => Ok(front.close()?),)+
                }
            }

            $crate::frontend_enum! { @each [$($variant)+] self (&mut self)
                poll(now: std::time::Instant, budget: &mut ::volume::Budget) -> bool;
                complete(completion: ::volume::Completion) -> ();
                poll_volumes(out: &mut Vec<::volume::Completion>) -> ();
                finish_round() -> bool;
                arm() -> bool;
                recheck() -> bool;
                drain_messages() -> bool;
                update_volumes() -> ();
                housekeeping(now: std::time::Instant) -> ();
                pin(pace: &mut ::volume::PinPace) -> ();
                ready(token: u32) -> ();
                read_on() -> ();
                flush() -> ();
            }
            $crate::frontend_enum! { @each [$($variant)+] self (&self)
                has_news() -> bool;
                in_flight() -> usize;
                must_poll() -> bool;
                is_unannounced() -> bool;
                keeps_window() -> bool;
                has_more() -> bool;
                is_trapped() -> bool;
                needs_recheck() -> bool;
                deadline() -> Option<std::time::Instant>;
                is_pinning() -> bool;
                is_drained() -> bool;
                has_ended() -> bool;
            }
        }
    };
    (@each $variants:tt $this:tt $receiver:tt $($method:ident $arguments:tt -> $result:ty;)+) => {
        $($crate::frontend_enum! { @one $variants $this $receiver $method $arguments $result })+
    };
    (
        @one $variants:tt $this:tt ($($receiver:tt)+) $method:ident
        ($($argument:ident: $type:ty),*) $result:ty
    ) => {
        #[inline]
        fn $method($($receiver)+, $($argument: $type),*) -> $result {
            $crate::frontend_enum!(@match $variants $this $method ($($argument),*))
        }
    };
    (@match [$($variant:ident)+] $this:tt $method:ident $arguments:tt) => {
        match $this {
            $(Self::$variant(front) => front.$method $arguments,)+
        }
    };
}

//! Who keeps a format, outlives the controller, and answers when the test wants.

use controller::{BlockFormat, FormatSaved, FormatStore, Formats};
use std::sync::{Arc, Mutex};

/// See the module.
#[derive(Default)]
pub struct TestStore(Mutex<State>);

#[derive(Default)]
struct State {
    kept: u32,
    saves: Vec<u32>,
    holds: bool,
    fails: bool,
    held: Vec<(bool, FormatSaved)>,
}

impl std::fmt::Debug for TestStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TestStore").finish_non_exhaustive()
    }
}

impl TestStore {
    pub fn new(kept: u32) -> Arc<Self> {
        let state = State {
            kept,
            ..State::default()
        };
        Arc::new(Self(Mutex::new(state)))
    }

    pub fn formats(self: &Arc<Self>, first: u32) -> Formats {
        Formats::new(first, self.clone())
    }

    /// What the next process finds.
    pub fn kept(&self) -> u32 {
        self.0.lock().unwrap().kept
    }

    /// All that it was asked to keep.
    pub fn saves(&self) -> Vec<u32> {
        self.0.lock().unwrap().saves.clone()
    }

    /// It keeps what it is asked to, and does not say so before [`TestStore::release`].
    pub fn hold(&self) {
        self.0.lock().unwrap().holds = true;
    }

    pub fn release(&self) {
        let mut state = self.0.lock().unwrap();
        state.holds = false;
        let held = std::mem::take(&mut state.held);
        drop(state);
        for (kept, done) in held {
            done(kept);
        }
    }

    /// It keeps nothing new.
    pub fn fail(&self, fails: bool) {
        self.0.lock().unwrap().fails = fails;
    }
}

impl FormatStore for TestStore {
    fn save(&self, format: BlockFormat, done: FormatSaved) {
        let mut state = self.0.lock().unwrap();
        state.saves.push(format.block);
        let kept = !state.fails;
        if kept {
            state.kept = format.block;
        }
        if state.holds {
            return state.held.push((kept, done));
        }
        drop(state);
        done(kept);
    }
}

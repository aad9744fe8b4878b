//! All states that a model can reach.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::Hash;

/// A system with steps that are tried in every order.
pub trait Model {
    type State: Clone + Eq + Hash + Debug;

    fn start(&self) -> Self::State;

    /// The states that one step leads to, with the step's name.
    fn steps(&self, state: &Self::State) -> Vec<(&'static str, Self::State)>;

    /// What is wrong with a state, if anything is.
    fn wrong(&self, state: &Self::State) -> Option<&'static str>;
}

/// What was found.
pub struct Outcome {
    pub states: usize,
    /// The shortest way to a state that is wrong, and what is wrong with it.
    pub failure: Option<(Vec<&'static str>, &'static str)>,
}

/// Looks at all states, the nearest first; ends at the first that is wrong.
pub fn explore<M: Model>(model: &M) -> Outcome {
    let start = model.start();
    let mut from: HashMap<M::State, Option<(M::State, &'static str)>> = HashMap::new();
    let mut waiting = VecDeque::from([start.clone()]);
    from.insert(start, None);
    while let Some(state) = waiting.pop_front() {
        if let Some(what) = model.wrong(&state) {
            let mut way = Vec::new();
            let mut at = &state;
            while let Some((before, step)) = &from[at] {
                way.push(*step);
                at = before;
            }
            way.reverse();
            return Outcome {
                states: from.len(),
                failure: Some((way, what)),
            };
        }
        for (step, next) in model.steps(&state) {
            if !from.contains_key(&next) {
                from.insert(next.clone(), Some((state.clone(), step)));
                waiting.push_back(next);
            }
        }
    }
    Outcome {
        states: from.len(),
        failure: None,
    }
}

/// Checks that the model has no failing order of steps.
pub fn holds<M: Model>(model: &M) {
    let found = explore(model);
    println!("{} states", found.states);
    assert!(found.failure.is_none(), "{:?}", found.failure);
    assert!(found.states > 1000, "the model does next to nothing");
}

/// Checks that the model has a failing order of steps.
pub fn fails<M: Model>(name: &str, model: &M) {
    let found = explore(model);
    let (way, what) = found
        .failure
        .unwrap_or_else(|| panic!("{name} is not found"));
    println!("{name}: {what} after {way:?}");
}

//! Which of the kept chunks was used least recently. Pure: a doubly linked list in a table, all operations in constant time.

use std::collections::HashMap;
use std::hash::Hash;

const NONE: usize = usize::MAX;

struct Node<K> {
    key: K,
    older: usize,
    newer: usize,
}

pub struct Lru<K> {
    places: HashMap<K, usize>,
    nodes: Vec<Node<K>>,
    free: Vec<usize>,
    oldest: usize,
    newest: usize,
}

impl<K: Copy + Eq + Hash> Lru<K> {
    pub fn new() -> Self {
        Lru {
            places: HashMap::new(),
            nodes: Vec::new(),
            free: Vec::new(),
            oldest: NONE,
            newest: NONE,
        }
    }

    /// Makes `key` the newest, whether it was there or not.
    pub fn touch(&mut self, key: K) {
        let place = match self.places.get(&key) {
            Some(place) if *place == self.newest => return,
            Some(place) => {
                let place = *place;
                self.unlink(place);
                place
            }
            None => {
                let node = Node {
                    key,
                    older: NONE,
                    newer: NONE,
                };
                let place = match self.free.pop() {
                    Some(place) => {
                        self.nodes[place] = node;
                        place
                    }
                    None => {
                        self.nodes.push(node);
                        self.nodes.len() - 1
                    }
                };
                self.places.insert(key, place);
                place
            }
        };
        self.nodes[place].older = self.newest;
        self.nodes[place].newer = NONE;
        match self.newest {
            NONE => self.oldest = place,
            newest => self.nodes[newest].newer = place,
        }
        self.newest = place;
    }

    /// Takes `key` out; false if it wasn't there.
    pub fn remove(&mut self, key: &K) -> bool {
        let Some(place) = self.places.remove(key) else {
            return false;
        };
        self.unlink(place);
        self.free.push(place);
        true
    }

    /// From the oldest to the newest.
    pub fn iter(&self) -> impl Iterator<Item = K> + '_ {
        let mut place = self.oldest;
        std::iter::from_fn(move || {
            let node = self.nodes.get(place)?;
            place = node.newer;
            Some(node.key)
        })
    }

    fn unlink(&mut self, place: usize) {
        let (older, newer) = (self.nodes[place].older, self.nodes[place].newer);
        match older {
            NONE => self.oldest = newer,
            older => self.nodes[older].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.nodes[newer].older = older,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(lru: &Lru<u32>) -> Vec<u32> {
        lru.iter().collect()
    }

    #[test]
    fn what_is_touched_becomes_the_newest() {
        let mut lru = Lru::new();
        (1..=4).for_each(|key| lru.touch(key));
        lru.touch(2);
        lru.touch(2);
        assert_eq!(order(&lru), [1, 3, 4, 2]);
        lru.touch(1);
        assert_eq!(order(&lru), [3, 4, 2, 1]);
    }

    #[test]
    fn what_is_removed_leaves_its_place_to_the_next() {
        let mut lru = Lru::new();
        (1..=3).for_each(|key| lru.touch(key));
        assert!(lru.remove(&1) && lru.remove(&3) && !lru.remove(&3));
        assert_eq!(order(&lru), [2]);
        assert!(lru.remove(&2));
        assert_eq!(order(&lru), []);
        (5..=7).for_each(|key| lru.touch(key));
        assert_eq!(order(&lru), [5, 6, 7]);
        assert_eq!(lru.nodes.len(), 3);
    }
}

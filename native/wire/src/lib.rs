//! Frames shared by chronus and the spawner.

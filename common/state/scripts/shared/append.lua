-- An event that belongs to no other script. One that is told under a lease needs that lease.
local seen = replayed()
if seen then return seen end
if a.name and not holds(a.name, a.token) then return fenced(a.name) end
event(a.kind, nil, a.fields)
return done({appended = true})
